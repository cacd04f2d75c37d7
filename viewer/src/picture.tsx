// A head over an image: what a patch attends to, what attends to it, and the mean over all queries.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { data, type HeadMap, type Layer, pixels, token } from "./data";
import { colour, type Colours, type Field, place, type Scale } from "./field";
import { coloursOn, type Figure, origin, type Paper } from "./figure";
import { FigureMenu } from "./figure_menu";
import { barOf, titled } from "./figures";
import { bestPattern } from "./grid";
import type { State } from "./state";
import { CanvasSurface, type Surface } from "./surface";
import { described, figures, fill, image as texts, regionNames } from "./texts";
import { mapValue, nameOf } from "./words";

const made: Record<string, HTMLCanvasElement> = {};

/** The image, a canvas with one pixel for each of its own; in grey where colours lie over it. */
export function theImage(grey: boolean): HTMLCanvasElement {
  const known = made[String(grey)];
  if (known) return known;
  const { width, height } = data.image!;
  const drawn = document.createElement("canvas");
  drawn.width = width;
  drawn.height = height;
  const context = drawn.getContext("2d")!;
  const image = context.createImageData(width, height);
  const raw = pixels();
  for (let n = 0; n < width * height; n++) {
    const [red, green, blue] = raw.subarray(3 * n, 3 * n + 3);
    const light = Math.round(0.299 * red + 0.587 * green + 0.114 * blue);
    image.data.set(grey ? [light, light, light, 255] : [red, green, blue, 255], 4 * n);
  }
  context.putImageData(image, 0, 0);
  made[String(grey)] = drawn;
  return drawn;
}

/** The mean over all queries, those of CLS and registers included: one value for each key. */
export function received(of: Field): Float32Array {
  const found = new Float32Array(of.columns);
  for (let c = 0; c < of.columns; c++) {
    let sum = 0;
    let count = 0;
    for (let r = 0; r < of.rows; r++) {
      const value = of.values[r * of.columns + c];
      if (value === value) [sum, count] = [sum + value, count + 1];
    }
    found[c] = count ? sum / count : NaN;
  }
  return found;
}

export const rowOf = (of: Field, row: number) => of.values.subarray(row * of.columns, (row + 1) * of.columns);
const columnOf = (of: Field, column: number) => Float32Array.from({ length: of.rows }, (_, row) => of.values[row * of.columns + column]);

/** The largest value of a patch. CLS and registers are left out: theirs is often so large that all patches look alike. */
export function topOf(values: Float32Array): number {
  let top = 0;
  for (let n = data.image!.special; n < values.length; n++) if (values[n] > top) top = values[n];
  return top || 1;
}

export interface Patches {
  values: Float32Array | null; // null: the image alone
  top: number;
  scale: Scale;
  colours: Colours;
  over: boolean;
  chosen: number | null; // a key
  size: [number, number];
  at?: [number, number]; // of the upper left corner
}

/** Patches in colours, with the outline of the object and a frame around the chosen one. */
export function drawPatches(surface: Surface, { values, top, scale, colours, over, chosen, size: [width, height], at = [0, 0] }: Patches): void {
  const { grid: [rows, columns], special } = data.image!;
  const box = { x: at[0], y: at[1], width, height };
  const image = theImage(values !== null);
  if (!values || over) surface.image(image, { x: 0, y: 0, width: image.width, height: image.height }, box);
  const [across, down] = [width / columns, height / rows];
  if (values) {
    const of = { top, signed: false } as Field;
    const canvas = document.createElement("canvas");
    canvas.width = columns;
    canvas.height = rows;
    const context = canvas.getContext("2d")!;
    context.globalAlpha = over ? 0.62 : 1;
    for (let n = 0; n < rows * columns; n++) {
      const value = values[n + special];
      if (value !== value) continue;
      context.fillStyle = colour(place(value, of, scale), colours).fill;
      context.fillRect(n % columns, Math.floor(n / columns), 1, 1);
    }
    surface.image(canvas, { x: 0, y: 0, width: columns, height: rows }, box);
  }
  if (across >= 5) outline(surface, across, down, across < 20 ? 1 : 2, at);
  if (chosen === null || chosen < special) return;
  const [x, y] = [at[0] + ((chosen - special) % columns) * across, at[1] + Math.floor((chosen - special) / columns) * down];
  surface.frame({ x: x + 1.5, y: y + 1.5, width: across - 3, height: down - 3 }, "#000", 3);
  surface.frame({ x: x + 1.5, y: y + 1.5, width: across - 3, height: down - 3 }, "#fff", 1.5);
}

const MOST_COVERED = 0.9; // of the image, by the colour of the largest weight

/** The image with where a query attends over it, in orange: no weight leaves the image as it is. A frame marks the query. */
export function drawAttended(surface: Surface, weights: Float32Array | null, query: number, [width, height]: [number, number]): void {
  const { grid: [rows, columns], special } = data.image!;
  const box = { x: 0, y: 0, width, height };
  const image = theImage(weights !== null);
  surface.image(image, { x: 0, y: 0, width: image.width, height: image.height }, box);
  const [across, down] = [width / columns, height / rows];
  if (weights) {
    const top = topOf(weights);
    for (let n = 0; n < rows * columns; n++) {
      const share = weights[n + special] / top;
      if (!(share > 0)) continue;
      const [x, y] = [Math.round((n % columns) * across), Math.round(Math.floor(n / columns) * down)];
      const size = { width: Math.round(((n % columns) + 1) * across) - x, height: Math.round((Math.floor(n / columns) + 1) * down) - y };
      surface.box({ x, y, ...size }, `rgb(255 120 0 / ${(MOST_COVERED * Math.min(1, share)).toFixed(3)})`);
    }
  }
  if (query < special) return;
  const [x, y] = [((query - special) % columns) * across, Math.floor((query - special) / columns) * down];
  for (const [ink, thick] of [["#000", 4], ["#fff", 2]] as const) surface.frame({ x: x + 1, y: y + 1, width: across - 2, height: down - 2 }, ink, thick);
}

/** Where object and ground meet. */
function outline(surface: Surface, across: number, down: number, thick: number, [x0, y0]: [number, number]): void {
  const { grid: [rows, columns], outline: inside } = data.image!;
  for (const [fill, wide] of [["#fff", thick + 2], ["#000", thick]] as const) {
    for (let n = 0; n < inside.length; n++) {
      const [row, column] = [Math.floor(n / columns), n % columns];
      const right = column + 1 < columns && inside[n] !== inside[n + 1];
      const below = row + 1 < rows && inside[n] !== inside[n + columns];
      // on whole pixels: where pieces overlap, half ones would show
      const [left, top] = [Math.floor(column * across - wide / 2), Math.floor(row * down - wide / 2)];
      const [x, y] = [Math.floor((column + 1) * across - wide / 2), Math.floor((row + 1) * down - wide / 2)];
      if (right) surface.box({ x: x0 + x, y: y0 + top, width: wide, height: y - top + wide }, fill);
      if (below) surface.box({ x: x0 + left, y: y0 + y, width: x - left + wide, height: wide }, fill);
    }
  }
}

// ---------------------------------------------------------------- one head

interface Props {
  layer: Layer;
  map: HeadMap;
  field: Field;
  state: State;
  theme: string;
  change: (part: Partial<State>) => void;
}

export function Images({ layer, field: of, state, theme, change }: Props) {
  const { grid, special } = data.image!;
  const chosen = queryOf(state, layer.index, state.head);
  const [over, setOver] = useState("");
  useLayoutEffect(() => setOver(""), [layer.index, state.head, chosen]); // the number was that of another
  const row = rowOf(of, chosen);
  const column = columnOf(of, chosen);
  const mean = received(of);
  const name = keyName(chosen);
  const pin = (at: number) => change({ row: at, column: at });
  const say = (text: string | null) => setOver(text ?? "");
  const rest = { state, theme, pin, chosen, head: [layer.index, state.head] as [number, number] };
  const best = (values: Float32Array, isRow = true) => { // the weights of a column do not add up to 1: they have no even spread
    let at: number | null = null; // null where the row is broken or every patch is masked
    for (let n = special; n < values.length; n++) if (values[n] === values[n] && (at === null || values[n] > values[at])) at = n;
    if (at === null) return texts.noWeight;
    if (!isRow) return texts.mostOf(token(at, true)!, mapValue(values[at]));
    return texts.most(token(at, true)!, mapValue(values[at]), values[at] * values.length);
  };
  return (
    <div>
      <div class="pictures">
        <Pane {...rest} values={null} shown={described.image(grid[0], grid[1])} caption={texts.original} picture="image"
          say={(at) => say(at === null ? null : token(at, true))} />
        <Pane {...rest} values={row} shown={best(row)} caption={fill(texts.looks, { name: <b>{name}</b>, most: best(row) })} picture="looks"
          say={(at) => say(at === null ? null : texts.pair(token(chosen, true)!, token(at, true)!, mapValue(row[at])))} />
        <Pane {...rest} values={column} shown={best(column, false)} caption={fill(texts.lookedAt, { name: <b>{name}</b>, most: best(column, false) })} picture="looked-at"
          say={(at) => say(at === null ? null : texts.pair(token(at, true)!, token(chosen, true)!, mapValue(column[at])))} />
        <Pane {...rest} values={mean} shown={best(mean)} caption={fill(texts.average(special), { most: best(mean) })} picture="all"
          say={(at) => say(at === null ? null : texts.averageOf(token(at, true)!, mapValue(mean[at])))} />
      </div>
      <p class="readout" aria-live="polite">{over || texts.hover}</p>
      {special > 0 && (
        <p class="specials">{fill(texts.special, { buttons: Array.from({ length: special }, (_, at) => (
          <button type="button" key={at} aria-pressed={chosen === at} onClick={() => pin(at)} title={texts.seeSpecial}>
            {token(at)} <small>{at === chosen && texts.itself} {mapValue(row[at])}</small>
          </button>
        )), weights: <small>{texts.specialWeights(name, special)}</small> })}</p>
      )}
      <p class="hint">{texts.scale} {data.image!.outline.length > 0 && texts.outline}</p>
    </div>
  );
}

interface PaneProps {
  state: State;
  theme: string;
  chosen: number;
  values: Float32Array | null;
  shown: string; // in words
  caption: preact.ComponentChildren;
  picture: keyof typeof texts.titles; // also the end of the names of its files
  head: [number, number];
  pin: (at: number) => void;
  say: (at: number | null) => void;
}

function Pane({ state, theme, chosen, values, shown, caption, picture, head, pin, say }: PaneProps) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const { grid: [rows, columns], special } = data.image!;
  const side = Math.max(1, Math.floor(300 / Math.max(rows, columns)));
  const size: [number, number] = [side * columns, side * rows];
  const patches = (): Patches => ({
    values, top: values ? topOf(values) : 1, scale: state.scale, colours: state.colours, over: state.over, size,
    chosen: picture === "all" ? null : chosen,
  });
  useEffect(() => {
    const ratio = window.devicePixelRatio || 1;
    canvas.current!.width = size[0] * ratio;
    canvas.current!.height = size[1] * ratio;
    const context = canvas.current!.getContext("2d")!;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    drawPatches(new CanvasSurface(context), patches());
    canvas.current!.dataset.drawn = "yes";
  }, [values, state.scale, state.colours, state.over, chosen, theme, ...size]);
  const at = (event: MouseEvent) => {
    const box = canvas.current!.getBoundingClientRect();
    const part = (x: number, length: number, parts: number) => Math.max(0, Math.min(parts - 1, Math.floor((x / length) * parts)));
    return special + part(event.clientY - box.top, box.height, rows) * columns + part(event.clientX - box.left, box.width, columns);
  };
  const pressed = (event: KeyboardEvent) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    const to = Math.max(chosen, special) + by;
    if (to >= special && to < special + rows * columns) pin(to);
  };
  const figureOn = (paper: Paper): Figure => {
    const colours = coloursOn(state.colours, paper.dark);
    const { top } = patches();
    return {
      name: `headscope-layer-${head[0]}-head-${head[1]}-${picture}`,
      title: titled(nameOf(...head), bestPattern({ layer: head[0], head: head[1] })),
      caption: [...origin(), figures.patches[picture](token(chosen, true)!), figures.scale(state.scale), state.over ? figures.over : "", data.image!.outline.length > 0 ? texts.outline : ""],
      body: {
        width: size[0], height: size[1], plot: { x: 0, y: 0, width: size[0], height: size[1] },
        draw(surface, x, y) {
          drawPatches(surface, { ...patches(), colours, at: [x, y] });
          surface.frame({ x, y, width: size[0], height: size[1] }, paper.inks.quiet, 1);
        },
      },
      bar: barOf({ top, signed: false, above: false }, "weight", state.scale, colours),
    };
  };
  return (
    <figure>
      <canvas ref={canvas} class="patches" tabIndex={0} role="img" aria-label={texts.label(texts.titles[picture], nameOf(...head), shown)}
        onClick={(event) => pin(at(event))} onMouseMove={(event) => say(at(event))} onMouseLeave={() => say(null)} onKeyDown={pressed} />
      <figcaption>{caption}{" "}
        {values && (
          <FigureMenu of={texts.titles[picture]} make={figureOn} />
        )}
      </figcaption>
    </figure>
  );
}

/** The query that a head over the image shows: the selected one, else that of its card, else the patch in the middle. */
export function queryOf(state: State, layer: number, head: number): number {
  const { special, grid } = data.image!;
  const card = data.highlights.find((each) => each.layer === layer && each.head === head)?.cell?.[0];
  return state.row ?? card ?? special + Math.floor(grid[0] / 2) * grid[1] + Math.floor(grid[1] / 2);
}

/** A key in a sentence: "patch row 3, column 5", "CLS". */
export function keyName(at: number): string {
  const name = token(at, true)!;
  return at < data.image!.special ? name : texts.patchNamed(name);
}

/** Regions of the image and how much weight falls on each, compared with an even spread. */
export function Regions({ layer, head }: { layer: number; head: number }) {
  const { regionWords } = data.image!;
  const aside = ["distance_ratio", "layout_r2"];
  const shown = Object.keys(regionWords).filter((name) => !aside.includes(name) && data.statistics[layer][name]?.mean[head] != null);
  if (shown.length === 0) return null;
  const most = Math.max(4, ...shown.map((name) => data.statistics[layer][name].mean[head]!));
  return (
    <div>
      <h3>{texts.regions}</h3>
      <ul class="regions">
        {shown.map((name) => {
          const ratio = data.statistics[layer][name].mean[head]!;
          return (
            <li key={name} title={regionWords[name].meaning}>
              <span>{regionNames[name] ?? regionWords[name].heading}</span>
              <span class="meter" aria-hidden="true"><i style={{ width: `${(100 * ratio) / most}%` }} /><u style={{ left: `${100 / most}%` }} /></span>
              <span>{texts.ratio(ratio)}</span>
            </li>
          );
        })}
      </ul>
      <p class="hint">{texts.even}</p>
    </div>
  );
}
