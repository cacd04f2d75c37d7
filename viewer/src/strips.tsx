// Weights near the diagonal and on the first keys, at full resolution: a column for each query, a line for each distance.

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { hasTexts, type Layer, queryAt, strip, token } from "./data";
import { colour, type Colours } from "./field";
import { Bar } from "./legend";
import { type Axis, type Body, coloursOn, type Figure, origin, type Paper, plotted, textOf } from "./figure";
import { FigureMenu } from "./figure_menu";
import { barOf, titled } from "./figures";
import { NumberField } from "./number";
import { useWidth } from "./screen";
import { MOST_QUERIES, type State } from "./state";
import { CanvasSurface, type Surface } from "./surface";
import { served, stripOf, why } from "./tiles";
import { described as inText, figure, figures, fill, legend, map as mapTexts, names, rough, strips as texts, strongest, whole } from "./texts";
import { nameOf, oneOf, position, step } from "./words";

const LINE = 11; // pixels
const LEFT = 58;
const MASKED = 255;
const REQUEST = 2048; // queries per request to a server

interface Band {
  from: number; // the first query of the codes
  codes: Uint8Array;
}

/** The weight under the pointer. */
interface Cell {
  query: number;
  line: number;
}

/** The strip of a head around some query, from the page or from the server; or why it failed; null until it is there. */
function useBand(layer: Layer, head: number, from: number): Band | string | null {
  const { heads, lengths: [queries] } = layer.strips!;
  const place = heads[head];
  const [found, setFound] = useState<{ key: string; band: Band | string } | null>(null);
  const start = place ? 0 : Math.max(0, Math.min(Math.floor(from / 1024) * 1024, queries - REQUEST));
  const key = `${layer.index}.${head}.${start}`;
  useEffect(() => {
    let stale = false;
    const keep = (band: Band | string) => !stale && setFound({ key, band });
    if (place) void strip(place).then((codes) => keep({ from: 0, codes }));
    else void stripOf(layer, head, [start, Math.min(queries, start + REQUEST)]).then((codes) => keep({ from: start, codes }), (error: unknown) => keep(why(error)));
    return () => void (stale = true);
  }, [key]);
  return found?.key === key ? found.band : null;
}

export function hasStrips(layer: Layer): boolean {
  return layer.strips !== null;
}

interface Props {
  layer: Layer;
  state: State;
  theme: string;
  change: (part: Partial<State>) => void;
}

export function Strips(props: Props) {
  const { layer, state } = props;
  const there = layer.strips!.heads[state.head] || served(layer);
  const others = Object.keys(layer.strips!.heads);
  return (
    <div class="strips">
      <h3>{texts.title}</h3>
      {there ? <Strip {...props} /> : (
        <p class="hint">{texts.missing(others)}</p>
      )}
    </div>
  );
}

function Strip({ layer, state, theme, change }: Props) {
  const { lengths: [queries, keys], offset, low, high, first } = layer.strips!;
  const canvas = useRef<HTMLCanvasElement>(null);
  const frame = useRef<HTMLDivElement>(null);
  const width = Math.max(160, Math.min(1400, useWidth(frame)));
  const count = Math.min(queries, state.many);
  const [over, setOver] = useState<Cell | null>(null);
  const chosen = state.row !== null && layer.map ? Math.floor((state.row * queries) / layer.map.rows) : null;
  const setFrom = (to: number | null) => change({ from: to });
  const from = state.from ?? Math.max(0, (chosen ?? 0) - Math.floor(count / 2));
  const found = useBand(layer, state.head, from);
  const failed = typeof found === "string" ? found : "";
  const band = typeof found === "string" ? null : found;
  const start = Math.max(0, Math.min(from, queries - count));
  const before = useRef({ chosen, start });
  useLayoutEffect(() => {
    // the strip follows the selection, and stays where it is when the selection is cleared
    if (before.current.chosen !== chosen) setFrom(chosen === null ? before.current.start : null);
    before.current = { chosen, start };
  });
  const near = high - low + 1;
  const lines = near + first;
  const height = lines * LINE + 8 + 16;
  const side = (width - LEFT) / count;
  const name = (line: number) => (line < near ? distance(high - line) : texts.key(line - near));
  const value = (query: number, line: number) => {
    const code = band!.codes[(query - band!.from) * lines + (line < near ? near - 1 - line : line)];
    return code === undefined || code === MASKED ? NaN : (code / 254) ** 2;
  };
  const top = (line: number) => line * LINE + (line >= near ? 8 : 0);
  const paint = (surface: Surface) => {
    const style = getComputedStyle(document.documentElement);
    const [quiet, hidden, panel] = ["--quiet", "--hidden", "--panel"].map((each) => style.getPropertyValue(each));
    surface.box({ x: 0, y: 0, width, height }, panel);
    for (let line = 0; line < lines; line++) {
      if (line >= near || (high - line) % 4 === 0) surface.text(name(line), LEFT - 5, top(line) + LINE / 2, { fill: quiet, anchor: "end", size: 10 });
      for (let n = 0; n < count; n++) {
        const p = value(start + n, line);
        surface.box({ x: LEFT + n * side, y: top(line), width: Math.ceil(side), height: LINE - 1 }, p === p ? shade(p, state) : hidden);
      }
    }
    const every = step(44 / side);
    for (let query = Math.ceil(start / every) * every; query < start + count; query += every) {
      const x = Math.max(LEFT + 8, Math.min(width - 16, LEFT + (query - start + 0.5) * side));
      surface.text(whole(query), x, height - 8, { fill: quiet, anchor: "middle", size: 10 });
    }
  };
  useEffect(() => {
    const ratio = window.devicePixelRatio || 1;
    const element = canvas.current!;
    element.width = width * ratio;
    element.height = height * ratio;
    const context = element.getContext("2d")!;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    if (!band) return;
    paint(new CanvasSurface(context));
    element.dataset.drawn = "yes";
  }, [band, start, count, width, state.scale, state.colours, theme]);
  const label = texts.label(nameOf(layer.index, state.head), start, start + count - 1);
  const point = (event: MouseEvent) => {
    const box = canvas.current!.getBoundingClientRect();
    const query = start + Math.floor((event.clientX - box.left - LEFT) / side);
    const y = event.clientY - box.top;
    const line = Math.floor((y >= near * LINE + 8 ? y - 8 : y) / LINE);
    setOver(inside({ query, line }) ? { query, line } : null);
  };
  const inside = ({ query, line }: Cell) => query >= start && query < start + count && line >= 0 && line < lines;
  const pressed = (event: KeyboardEvent) => {
    const [down, across] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] ?? [0, 0];
    if ((!down && !across) || event.shiftKey || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    const query = Math.max(0, Math.min(queries - 1, at ? at.query + across : start));
    setOver({ query, line: Math.max(0, Math.min(lines - 1, at ? at.line + down : high)) });
    if (query < start || query >= start + count) setFrom(query < start ? query : query - count + 1);
  };
  const at = over && inside(over) ? over : null;
  const described = ({ query, line }: Cell) => {
    const key = line < near ? query + offset + high - line : line - near;
    const p = value(query, line);
    return texts.weight(position(layer, "query", query), key < 0 || key >= keys ? null : position(layer, "key", key), p === p ? rough(p) : null);
  };
  const shown = useMemo(() => (band ? inWords(value, [start, start + count], lines, described) : ""), [band, start, count, theme]);
  const sizes = [20, 50, 100, 200, 500].filter((n) => n < queries);
  return (
    <div ref={frame}>
      <p class="switches">
        <label>{texts.from} <NumberField min={0} max={Math.max(0, queries - count)} value={start} set={setFrom} /></label>
        <input type="range" aria-label={texts.first} min={0} max={Math.max(0, queries - count)} value={start} onInput={(event) => setFrom(event.currentTarget.valueAsNumber)} />
        {sizes.length > 0 && (
          <label>{texts.count} <select value={count} onChange={(event) => change({ many: Number(event.currentTarget.value) })}>
            {[...new Set([...sizes, Math.min(queries, MOST_QUERIES), count])].sort((a, b) => a - b).map((n) => <option key={n} value={n}>{whole(n)}</option>)}
          </select></label>
        )}
        {band && <FigureMenu of={figures.strip} make={(paper) => stripFigure({ layer, state, start, count, value }, paper)} />}
      </p>
      <div class="banded">
        <canvas ref={canvas} class="band" tabIndex={0} role="img" aria-label={texts.keys(`${label}. ${shown}`.replace(/[.。]$/, ""))} style={{ width: `${width}px`, height: `${height}px` }}
          onMouseMove={point} onMouseLeave={() => setOver(null)} onKeyDown={pressed} onBlur={() => setOver(null)} />
        {at && <i style={{ left: `${LEFT + (at.query - start) * side}px`, top: `${top(at.line)}px`, width: `${side}px`, height: `${LINE - 1}px` }} />}
      </div>
      <p class="hint legend">
        <Bar what={legend.what("weight", state.scale)} low={state.scale === "log" ? legend.atMost(figure(1e-4)) : figure(0)} high={whole(1)} colours={state.colours} />
        <span>{texts.scale} {oneOf(layer) && texts.of(oneOf(layer))}</span>
      </p>
      <p class="readout" role="status"><bdi>{failed || (at && band ? described(at) : texts.hint(low, high, first))}</bdi></p>
    </div>
  );
}

/** The three largest weights in sight. */
function inWords(value: (query: number, line: number) => number, [from, to]: [number, number], lines: number, name: (cell: Cell) => string): string {
  const best: (Cell & { p: number })[] = [];
  for (let query = from; query < to; query++) {
    for (let line = 0; line < lines; line++) {
      const p = value(query, line);
      if (!(p > (best[2]?.p ?? 0))) continue;
      best.push({ query, line, p });
      best.sort((a, b) => b.p - a.p).splice(3);
    }
  }
  return best.length > 0 ? inText.strip(best.map(name).join(inText.also)) : "";
}

function distance(by: number): string {
  return by === 0 ? texts.self : texts.away(by);
}

function shade(p: number, state: { scale: string; colours: Colours }): string {
  const at = state.scale === "log" ? Math.max(0, 1 + Math.log10(Math.max(p, 1e-9)) / 4) : p;
  return colour(at, state.colours).fill;
}

// ---------------------------------------------------------------- the strip as a figure

interface Drawing {
  layer: Layer;
  state: State;
  start: number;
  count: number;
  value: (query: number, line: number) => number;
}

function stripFigure({ layer, state, start, count, value }: Drawing, paper: Paper): Figure {
  const { low, high, first } = layer.strips!;
  const colours = coloursOn(state.colours, paper.dark);
  const near = high - low + 1;
  const lines = near + first;
  const columns: Axis = { title: mapTexts.axis("query"), start, stop: start + count, text: hasTexts(layer) ? textOf(layer, "query") : null };
  const rows: Axis = { title: texts.distance, start: 0, stop: lines, text: (line) => (line >= near ? texts.key(line - near) : (high - line) % 4 ? "" : distance(high - line)) };
  const across = Math.max(4, Math.min(12, Math.floor(800 / count)));
  const body: Body = plotted(columns, rows, [across * count, LINE * lines], paper, (surface, box) => {
    surface.box(box, paper.inks.hidden);
    for (let line = 0; line < lines; line++) {
      for (let n = 0; n < count; n++) {
        const p = value(start + n, line);
        if (p === p) surface.box({ x: box.x + n * across, y: box.y + line * LINE, width: across, height: LINE }, shade(p, { ...state, colours }));
      }
    }
    if (first > 0) surface.box({ x: box.x, y: box.y + near * LINE - 0.5, width: box.width, height: 1 }, paper.inks.quiet);
  });
  return {
    name: `headscope-layer-${state.layer}-head-${state.head}-strip`,
    title: titled(nameOf(layer.index, state.head), texts.title.toLowerCase()),
    caption: [...origin(), figures.strips(start, start + count - 1, first), oneOf(layer) && texts.of(oneOf(layer)), figures.scale(state.scale), figures.rough],
    body,
    bar: barOf({ top: 1, signed: false, above: false }, "weight", state.scale, colours),
  };
}

// ---------------------------------------------------------------- the largest weights of a row

type Largest = { each: number; p: Float32Array; keys: Uint32Array };

/** The keys with the largest weights of a query, exact: of the selected query where it is known, else of the first one in the selected row of bins. */
export function Top({ layer, top, row, cell }: { layer: Layer; top: Largest; row: number; cell: [number, number] | null }) {
  const [queries] = layer.lengths!;
  const rows = layer.map?.ranges ? layer.map.rows : queries;
  const bin = Math.min(row, rows - 1);
  const [start, stop] = rows < queries ? [Math.floor((bin * queries) / rows), Math.floor(((bin + 1) * queries) / rows)] : [bin, bin + 1];
  const [at, setAt] = useState(cell ? cell[0] : start);
  const query = Math.max(start, Math.min(stop - 1, at));
  const found = Array.from({ length: top.each }, (_, n) => query * top.each + n).filter((n) => top.keys[n] !== 0xffffffff);
  return (
    <div>
      <h4>{fill(strongest.keys(top.each), {
        query: stop - start > 1 ? <NumberField label={strongest.queryLabel} min={start} max={stop - 1} value={query} set={setAt} /> : whole(query),
        token: hasTexts(layer) && <bdi>{names.inQuotes(token(queryAt(layer, query), true)!)}</bdi>,
      })}</h4>
      <ol class="largest">
        {found.map((n) => <li key={n}>{fill(strongest.key, { weight: <b>{figure(top.p[n])}</b>, key: <bdi>{position(layer, "key", top.keys[n])}</bdi> })}</li>)}
      </ol>
    </div>
  );
}

