// Every head, layers × heads or in the order of a statistic. Its small map is drawn once it scrolls into view or the page is idle,
// so that a print holds the maps that were never scrolled to, too.

import type { ComponentChildren, RefObject } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { hasBands, segmentInks } from "./bands";
import { data, type Head, hasPatches, head as decoded, type HeadMap, type Layer, onOtherData, passing, queryAt, token } from "./data";
import { drawWhenNear } from "./drawing_queue";
import { type Colours, colour, FEW_CELLS, field, hasQuantile, Pictures } from "./field";
import { type Body, coloursOn, type Figure, fitted, measured, origin, type Paper, SMALL, ticksOf } from "./figure";
import { FigureMenu } from "./figure_menu";
import { isScored, NAMED, nameInWords, namesOf, secondName } from "./naming";
import { drawPatches, queryOf, received, rowOf, topOf } from "./picture";
import { useWidth } from "./screen";
import type { State } from "./state";
import { CanvasSurface, type Surface } from "./surface";
import { controls, figure, figures, grid, image, NO_VALUE, regionNames } from "./texts";
import { binning, ending, isClear, layerName, nameOf, parts, statistic, withoutFirst } from "./words";

export interface Place {
  layer: number;
  head: number;
}

/** The statistic that a tile shows where no map was recorded. */
export const TILE = data.names.some((each) => each.name === "normalized_entropy") ? "normalized_entropy" : (data.names[0]?.name ?? "");

const WIDEST = Math.max(...data.layers.map((layer) => layer.heads));

export function all(): Place[] {
  return data.layers.flatMap((layer, at) => Array.from({ length: layer.heads }, (_, head) => ({ layer: at, head })));
}

/** Whether a head is named by a pattern, first or second, or a region of the image is the one that it attends to beyond chance. */
function hasPattern(place: Place, name: string): boolean {
  if (!isRegion(name)) return namesOf(place).some(([each]) => each === name);
  return namesOf(place)[0]?.[0] !== "fixed key" && data.image!.clear[place.layer]?.[place.head] === name;
}

function isRegion(name: string): boolean {
  return data.image !== null && name in data.image.regionWords;
}

/** The statistic of a head that the filter compares: the score is that of the chosen pattern. */
function filtered(place: Place, { by, pattern }: State): number | null {
  if (by !== "score" || !pattern || isRegion(pattern)) return statistic(place.layer, place.head, by);
  return namesOf(place).find(([each]) => each === pattern)?.[1] ?? null;
}

/** The heads that match the filters, in the chosen order; heads without the statistic come last. */
export function chosen(state: State): Place[] {
  let found = all();
  if (state.pattern) found = found.filter((place) => hasPattern(place, state.pattern));
  const { by, least, under } = state;
  if (by && least !== null) {
    found = found.filter((place) => {
      const value = filtered(place, state);
      return value !== null && (under ? value <= least : value >= least);
    });
  }
  if (!state.sort) return found;
  const of = ({ layer, head }: Place) => statistic(layer, head, state.sort);
  const sign = state.down ? -1 : 1;
  return found.sort((a, b) => {
    const [x, y] = [of(a), of(b)];
    if (x === null || y === null) return Number(x === null) - Number(y === null);
    return sign * (x - y);
  });
}

/** The name of a head with its score, and its second name: "first 59 % · induction". */
export function bestPattern(place: Place): string {
  const second = hasLook(place) ? "" : secondName(place);
  return [namePattern(place), second].filter(Boolean).join(" · ");
}

function hasLook({ layer, head }: Place): boolean {
  return Boolean(data.image?.looks[layer]?.[head]);
}

function namePattern({ layer, head }: Place): string {
  const look = data.image?.looks[layer]?.[head];
  if (look) return isClear(look) ? (data.image!.fixed?.[layer]?.[head] ? grid.fixedRegion : grid.region)(regionNames[look[0]] ?? look[0], look[1]) : NO_VALUE;
  const best = data.patterns[layer]?.[head]?.[0];
  if (!best) return isScored() ? NO_VALUE : "";
  return best[1] < NAMED ? NO_VALUE : grid.match(nameInWords(best[0], best[1]), best[1]);
}

/** Whether the best match of a head is a weak one, or what chance gives. */
export function isWeak({ layer, head }: Place): boolean {
  const look = data.image?.looks[layer]?.[head];
  const [name, score] = data.patterns[layer]?.[head]?.[0] ?? ["", 0];
  return look ? !isClear(look) : score < NAMED || name === "uniform";
}

interface Props {
  state: State;
  theme: string;
  open: (place: Place) => void;
}

export function Grid({ state, theme, open }: Props) {
  const found = chosen(state);
  const element = useRef<HTMLDivElement>(null);
  const key = (event: KeyboardEvent) => {
    const buttons = [...element.current!.querySelectorAll<HTMLButtonElement>("button.thumb")];
    const at = buttons.indexOf(document.activeElement as HTMLButtonElement);
    if (at < 0) return;
    const to = neighbour(buttons, at, event.key);
    if (to === null) return;
    event.preventDefault();
    buttons[to].focus();
  };
  /** The number of a layer or head opens that one; of the opened head the other number stays. */
  const label = (event: MouseEvent) => {
    const axis = (event.target as Element).closest<HTMLElement>(".axis");
    if (!axis) return;
    const layer = Number(axis.dataset.layer ?? state.layer);
    const head = Number(axis.dataset.head ?? state.head);
    open({ layer, head: Math.min(head, data.layers[layer].heads - 1) });
  };
  const stop = found.find((place) => isOpened(place, state)) ?? found[0]; // where Tab leads to
  const thumb = (place: Place) => <Thumb key={`${place.layer}.${place.head}`} {...{ place, state, theme, open }} stop={place === stop} />;
  const rows = state.sort ? [] : data.layers.map((_, layer) => found.filter((place) => place.layer === layer));
  const many = WIDEST > 16;
  const marked = useMarks(element);
  return (
    <Frame element={element} onKeyDown={key} onClick={(event: MouseEvent) => label(event)} {...marked} class={`grid${state.sort ? "" : " axes"}${many ? " many" : ""}`}>
      {found.length === 0 && <p class="hint">{grid.none}</p>}
      {state.sort ? (
        <div class="heads">{found.map(thumb)}</div>
      ) : found.length > 0 && (
        <>
          <div class="top" aria-hidden="true">
            <span class="corner">{grid.head} →<br />{grid.layer} ↓</span>
            {Array.from({ length: WIDEST }, (_, head) => <span class="axis" data-head={head} title={grid.headTip(head)} key={head}>{head}</span>)}
          </div>
          {rows.map((row, layer) =>
            row.length > 0 && (
              <div class="layer" key={layer}>
                <h3 class="axis" data-layer={layer} title={grid.layerTip(data.layers[layer].name)}><LayerName layer={layer} /></h3>
                <div class="heads">{row.map(thumb)}</div>
              </div>
            ),
          )}
        </>
      )}
    </Frame>
  );
}

/** The grid, which scrolls by itself where its columns do not fit. It knows its width, so that its heads need not be rendered again. */
function Frame({ element, children, class: name, ...rest }: { element: RefObject<HTMLDivElement | null>; children: ComponentChildren; class: string } & Record<string, unknown>) {
  const width = useWidth(element) || document.documentElement.clientWidth - MARGINS; // before it is measured: what gets the focus is scrolled to now
  const fits = width >= WIDEST * (WIDEST > 16 ? LEAST_OF_MANY : LEAST) + AXIS;
  useLayoutEffect(() => element.current!.style.setProperty("--top", `${Math.round(element.current!.getBoundingClientRect().top + scrollY)}px`));
  const few = data.layers.length <= FEW_LAYERS ? " few" : "";
  return <div {...rest} ref={element} class={`${name}${few}${fits ? "" : " scrolling"}`} style={{ "--heads": String(WIDEST), "--layers": String(data.layers.length) }}>{children}</div>;
}

const FEW_LAYERS = 8; // that all fit the height of the window
const MARGINS = 80; // pixels beside the grid, at most
const AXIS = 64; // pixels for the names of layers, where they are numbers
const LEAST = 48; // pixels of a column
const LEAST_OF_MANY = 30;

/** The number of a layer, or its name with places where a line may end. */
function LayerName({ layer }: { layer: number }) {
  const { short } = data.layers[layer];
  if (/^\d+$/.test(short)) return <><span class="word">{grid.layer} </span>{short}</>;
  return <>{parts(layerName(layer)).map((part) => <>{part}<wbr /></>)}</>;
}

/** Marks the row or column whose number is under the pointer, and the numbers of the head under the pointer or in focus. The
 * attributes are set directly: to render thousands of thumbnails for each move of the pointer would be slow. */
function useMarks(element: RefObject<HTMLElement | null>) {
  const last = useRef<Element | null>(null);
  const mark = (event: Event) => {
    const target = (event.target as Element).closest<HTMLElement>(".axis, .thumb");
    if (target === last.current) return;
    last.current = target;
    for (const each of element.current!.querySelectorAll<HTMLElement>("[data-lit]")) delete each.dataset.lit;
    if (!target) return;
    const { layer, head } = target.dataset;
    const [row, column] = [`[data-layer="${layer}"]`, `[data-head="${head}"]`];
    const lit = target.matches(".thumb") ? `.axis${row}, .axis${column}` : layer === undefined ? column : row;
    for (const each of element.current!.querySelectorAll<HTMLElement>(lit)) each.dataset.lit = "";
  };
  return { onPointerOver: mark, onFocusIn: mark, onPointerLeave: mark };
}

/** The button that an arrow leads to: the next, or the nearest in the line above or below. */
function neighbour(buttons: HTMLElement[], at: number, key: string): number | null {
  if (key === "ArrowLeft") return Math.max(0, at - 1);
  if (key === "ArrowRight") return Math.min(buttons.length - 1, at + 1);
  if (key !== "ArrowUp" && key !== "ArrowDown") return null;
  const from = buttons[at].getBoundingClientRect();
  const sign = key === "ArrowDown" ? 1 : -1;
  let best: number | null = null;
  let least = Infinity;
  for (let n = at + sign; n >= 0 && n < buttons.length; n += sign) {
    const to = buttons[n].getBoundingClientRect();
    const [down, across] = [Math.abs(to.top - from.top), Math.abs(to.left - from.left)];
    if (down < 1) continue;
    if (down * 1000 + across < least) [best, least] = [n, down * 1000 + across];
    else if (down * 1000 > least) break;
  }
  return best ?? at;
}

function isOpened({ layer, head }: Place, state: State): boolean {
  return layer === state.layer && head === state.head;
}

/** `stop`: whether Tab leads to it. */
export function Thumb({ place, state, theme, open, stop }: Props & { place: Place; stop: boolean }) {
  const { layer, head } = place;
  const canvas = useRef<HTMLCanvasElement & HTMLImageElement>(null);
  const mapped = data.layers[layer].map;
  useEffect(() => {
    if (!mapped) return;
    const element = canvas.current!; // the reference is empty before this effect is cleaned up
    const side = Math.max(1, Math.round(element.clientWidth * devicePixelRatio)); // now: between drawings the question would lay out all heads again
    let stale = false;
    const draw = async (read: (layer: number, head: number) => Promise<Head>) => {
      const { map } = await read(layer, head);
      const show = stale || !map ? undefined : fill(element, side, map, layer, state);
      return show && (() => void (stale || show()));
    };
    const end = drawWhenNear(element, { near: () => draw(decoded), later: () => draw(passing) });
    return () => {
      stale = true;
      end();
    };
  }, [layer, head, state.pool, state.sink, state.scale, state.colours, state.thumbs, state.over, state.thumbs === "patch" ? state.row : 0, theme]);
  const name = state.sort || (mapped ? "" : TILE); // of the statistic on the thumbnail
  const value = name ? statistic(layer, head, name) : null;
  const pattern = namePattern(place);
  const second = pattern && !hasLook(place) ? secondName(place) : "";
  const heading = data.names.find((each) => each.name === name)?.heading ?? name;
  return (
    <button
      type="button"
      class={`thumb${isOpened(place, state) ? " opened" : ""}`}
      aria-current={isOpened(place, state) ? "true" : undefined}
      aria-label={grid.thumb(nameOf(layer, head), bestPattern(place), name && `${heading} ${figure(value)}`)}
      data-layer={layer}
      data-head={head}
      style={{ "--column": String(head + 2) }}
      tabIndex={stop ? 0 : -1}
      onClick={() => open(place)}
    >
      {mapped ? PAINTED ? <img ref={canvas} alt="" /> : <canvas ref={canvas} /> : <Tile place={place} name={name} colours={state.colours} />}
      <span class="number">{state.sort ? `${data.layers[layer].short}·${head}` : head}</span>
      {state.sort ? <b>{figure(value)}</b> : pattern && <small class={isWeak(place) ? "weak" : ""}>{pattern}{second && <> <span>· {second}</span></>}</small>}
    </button>
  );
}

const spans = new Map<string, [number, number]>();
onOtherData(() => spans.clear());

/** The least and the most of a statistic of all heads. */
export function spanOf(name: string): [number, number] {
  let found = spans.get(name);
  if (!found) {
    found = [Infinity, -Infinity];
    for (const { layer, head } of all()) {
      const value = statistic(layer, head, name);
      if (value !== null) found = [Math.min(found[0], value), Math.max(found[1], value)];
    }
    spans.set(name, found);
  }
  return found;
}

/** Where no map was recorded: the colour of a statistic between the least and the most of all heads. */
function Tile({ place, name, colours }: { place: Place; name: string; colours: Colours }) {
  const [least, most] = spanOf(name);
  const value = statistic(place.layer, place.head, name);
  const { fill, white } = colour(value === null || most === least ? 0 : (value - least) / (most - least), colours);
  return <i class="tile" style={{ background: value === null ? "none" : fill, color: white ? "white" : "black" }}>{figure(value)}</i>;
}

/** With more heads than this, thumbnails are images: Chromium makes a layer of each canvas, and with 3,072 of them and axes that stay in
 * sight a frame takes 0.6 s. */
const PAINTED = all().length > 600;

/** Draw a small picture of a head, so many pixels wide and high; an image appears when what is returned is called. */
function fill(element: HTMLCanvasElement | HTMLImageElement, side: number, map: HeadMap, layer: number, state: State): (() => void) | undefined {
  const canvas = element instanceof HTMLCanvasElement ? element : document.createElement("canvas");
  canvas.width = canvas.height = side;
  element.dataset.bands = hasBands(data.layers[layer]) && side >= BANDED ? "yes" : "no"; // their legend is shown only then
  small(new CanvasSurface(canvas.getContext("2d")!), map, layer, state, side, [0, 0]);
  const show = () => void (element.dataset.drawn = "yes");
  if (element instanceof HTMLCanvasElement) return void show();
  const url = canvas.toDataURL();
  return () => {
    element.src = url;
    show();
  };
}

/** `ratio`: pixels of the picture for each unit of `side`. */
function small(surface: Surface, map: HeadMap, layer: number, state: State, side: number, [x, y]: [number, number], ratio = 1): void {
  const of = field(map, state.pool, state.sink, data.layers[layer].map!.exact);
  if (showsImage(state, layer, map)) {
    const [rows, columns] = data.image!.grid;
    const chosen = patchOf(state);
    const values = state.thumbs === "patch" ? rowOf(of, Math.min(chosen, of.rows - 1)) : received(of);
    const canvas = document.createElement("canvas");
    const size: [number, number] = [Math.round((side * columns) / Math.max(rows, columns)), Math.round((side * rows) / Math.max(rows, columns))];
    [canvas.width, canvas.height] = size.map((each) => each * ratio);
    const context = canvas.getContext("2d")!;
    context.scale(ratio, ratio);
    const { scale, colours, over } = state;
    const patches = { values, top: topOf(values), scale, colours, over, size, chosen: state.thumbs === "patch" ? chosen : null };
    drawPatches(new CanvasSurface(context), patches);
    surface.image(canvas, { x: 0, y: 0, width: canvas.width, height: canvas.height }, { x: x + (side - size[0]) / 2, y: y + (side - size[1]) / 2, width: size[0], height: size[1] });
    return;
  }
  const canvas = new Pictures(of, state.scale, state.colours).fit(side * ratio);
  const band = hasBands(data.layers[layer]) && side >= BANDED ? Math.round(side / 30) : 0; // pixels of the segments along both axes
  if (band) segmentEdges(surface, data.layers[layer], side, band, [x, y]);
  surface.image(canvas, { x: 0, y: 0, width: canvas.width, height: canvas.height }, { x: x + band, y: y + band, width: side - band, height: side - band });
}

const BANDED = 80; // pixels of a thumbnail from which it has bands

/** The segments of queries and keys, left of a small map and above it. */
function segmentEdges(surface: Surface, layer: Layer, side: number, band: number, [x, y]: [number, number]): void {
  const colours = segmentInks();
  const length = side - band;
  for (const [segment, start, stop] of layer.segments!.spans) {
    const part = (axis: number, shift: number) => [start, stop].map((at) => band + (Math.max(0, at - shift) / layer.lengths![axis]) * length);
    const fill = colours[segment % colours.length];
    const [[top, bottom], [left, right]] = [part(0, queryAt(layer, 0)), part(1, 0)];
    surface.box({ x, y: y + top, width: band, height: bottom - top }, fill);
    surface.box({ x: x + left, y, width: right - left, height: band }, fill);
  }
}

/** Whether the small pictures of a layer are over the image. */
function showsImage(state: State, layer: number, map: HeadMap): boolean {
  return data.image !== null && state.thumbs !== "map" && hasPatches(data.layers[layer]) && map.columns === data.layers[layer].lengths![1];
}

/** The query whose weights small pictures show. */
const patchOf = (state: State) => queryOf(state, state.layer, state.head);

// ---------------------------------------------------------------- all of them as one figure

const GAP = 6;
const LINE = 14;

/** The menu that saves all heads as one figure, with the progress of the drawing. */
export function Exports({ state }: { state: State }) {
  const [drawn, setDrawn] = useState(0);
  const make = (paper: Paper) => gridFigure({ ...state, colours: coloursOn(state.colours, paper.dark) }, paper, (n) => setDrawn(n < found.length ? n : 0));
  const found = chosen(state);
  return <FigureMenu of={figures.allHeads} make={make} busy={drawn > 0 ? grid.drawing(drawn, found.length) : ""} />;
}

/** Every head that is shown, in lines as they are on the screen; `progress` is called with the number of each head. */
function gridFigure(state: State, paper: Paper, progress: (drawn: number) => void): Figure {
  const found = chosen(state);
  const { scale } = state;
  const first = data.layers[found[0]?.layer ?? 0];
  const pictures = data.image !== null && state.thumbs !== "map";
  return {
    name: "headscope-heads",
    title: figures.heads(found.length, state.sort && (data.names.find(({ name }) => name === state.sort)?.heading ?? controls.score)),
    caption: [
      ...origin(),
      pictures ? (state.thumbs === "patch" ? figures.eachPatch(token(patchOf(state), true)!) : figures.eachPicture(controls.thumbsMean(data.image!.special))) : figures.eachMap,
      pictures ? grid.ownScale("image", "", 0, 0) : figures.ownScales,
      pictures ? "" : binning(first, state.pool),
      figures.scale(scale),
      pictures || !first.map ? "" : ending(first.map, FEW_CELLS),
      first.map ? withoutFirst(first, state) : "",
      figures.match(data.image ? "×%" : "%"),
      pictures && state.over ? figures.over : "",
      pictures && data.image!.outline.length > 0 ? image.outline : "",
    ],
    body: gridBody(state, found, paper, progress),
    bar: { label: !pictures && first.map && hasQuantile(first.map) ? figures.shareOfQuantile(scale) : figures.shareOfLargest(pictures, scale), colours: state.colours, signed: false, ticks: ticksOf({ top: 1, signed: false, above: false }, scale) },
  };
}

function gridBody(state: State, found: Place[], { inks, ratio }: Paper, progress: (drawn: number) => void): Body {
  const side = found.length > 2000 ? 24 : found.length > 200 ? 48 : 96;
  const layers = state.sort ? [] : [...new Set(found.map((place) => place.layer))];
  const across = state.sort ? Math.min(Math.max(1, found.length), found.length > 200 ? 16 : 8) : WIDEST;
  const lines = state.sort ? Math.ceil(found.length / across) : layers.length;
  const named = side === 96 || !!state.sort; // a line of text below each map
  const down = side + GAP + (named ? LINE : 0);
  const names = layers.map((layer) => fitted(data.layers[layer].short, 90));
  const left = state.sort ? 0 : 18 + Math.ceil(Math.max(0, ...names.map((name) => measured(name)))) + 8;
  const top = state.sort ? 0 : 32;
  const plot = { x: left, y: top, width: across * (side + GAP) - GAP, height: Math.max(side, lines * down - GAP) };
  const label = { fill: inks.ink, anchor: "middle", size: SMALL } as const;
  return {
    plot, width: left + plot.width + 2, height: top + plot.height,
    async draw(surface, x, y) {
      if (!state.sort) {
        surface.text(grid.head, x + left + plot.width / 2, y + 6, label);
        surface.text(grid.layer, x + 6, y + top + plot.height / 2, { ...label, upright: true });
        for (let head = 0; head < WIDEST; head++) surface.text(String(head), x + left + head * (side + GAP) + side / 2, y + top - 9, label);
        names.forEach((name, line) => surface.text(name, x + left - 8, y + top + line * down + side / 2, { ...label, anchor: "end" }));
      }
      for (const [n, place] of found.entries()) {
        progress(n + 1);
        const [column, line] = state.sort ? [n % across, Math.floor(n / across)] : [place.head, layers.indexOf(place.layer)];
        const at: [number, number] = [x + left + column * (side + GAP), y + top + line * down];
        const { map } = await passing(place.layer, place.head);
        surface.box({ x: at[0], y: at[1], width: side, height: side }, inks.hidden);
        if (map) small(surface, map, place.layer, state, side, at, ratio);
        if (named) surface.text(nameBelow(place, state, side), at[0] + side / 2, at[1] + side + LINE / 2, label);
      }
    },
  };
}

/** What stands below a map: in an order of their own the head, and the pattern that it clearly matches. */
function nameBelow(place: Place, state: State, side: number): string {
  const number = state.sort ? `${data.layers[place.layer].short}·${place.head}` : "";
  const named = side >= 96 && !isWeak(place);
  const text = (pattern: string) => [number, named ? pattern : ""].filter(Boolean).join(" ");
  const room = side + GAP - 2;
  const whole = text(bestPattern(place));
  return measured(whole) <= room ? whole : fitted(text(namePattern(place)), room); // the score has precedence over a second name
}
