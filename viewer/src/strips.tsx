// Weights near the diagonal and on the first keys, at full resolution: a column for each query, a line for each distance.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { hasTexts, type Layer, queryAt, strip, token } from "./data";
import { colour, type Colours } from "./field";
import { Bar } from "./legend";
import { save } from "./map";
import { NumberField } from "./number";
import { useWidth } from "./screen";
import { MOST_QUERIES, type State } from "./state";
import { CanvasSurface, type Surface, SvgSurface } from "./surface";
import { served, stripOf, why } from "./tiles";
import { figure, nameOf, oneOf, position, rough, step, whole } from "./words";

const LINE = 11; // pixels
const LEFT = 58;
const HIDDEN = 255;
const ASKED = 2048; // queries at a time of a server

interface Band {
  from: number; // the first query that is here
  codes: Uint8Array;
}

/** What is pointed at. */
interface Cell {
  query: number;
  line: number;
}

/** The strip of a head around some query, from the page or from the server; or why there is none; null before. */
function useBand(layer: Layer, head: number, from: number): Band | string | null {
  const { heads, lengths: [queries] } = layer.strips!;
  const place = heads[head];
  const [found, setFound] = useState<{ key: string; band: Band | string } | null>(null);
  const start = place ? 0 : Math.max(0, Math.min(Math.floor(from / 1024) * 1024, queries - ASKED));
  const key = `${layer.index}.${head}.${start}`;
  useEffect(() => {
    let stale = false;
    const keep = (band: Band | string) => !stale && setFound({ key, band });
    if (place) void strip(place).then((codes) => keep({ from: 0, codes }));
    else void stripOf(layer, head, [start, Math.min(queries, start + ASKED)]).then((codes) => keep({ from: start, codes }), (error: unknown) => keep(why(error)));
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
      <h3>Near the diagonal, and on the first keys</h3>
      {there ? <Strip {...props} /> : (
        <p class="hint">The page holds these at full resolution for up to 16 heads{others.length > 0 && `, in this layer for ${others.length === 1 ? "head" : "heads"} ${others.join(", ")}`}; not for this one.</p>
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
  const pinned = state.row !== null && layer.map ? Math.floor((state.row * queries) / layer.map.rows) : null;
  const setFrom = (to: number | null) => change({ from: to });
  const from = state.from ?? Math.max(0, (pinned ?? 0) - Math.floor(count / 2));
  const found = useBand(layer, state.head, from);
  const failed = typeof found === "string" ? found : "";
  const band = typeof found === "string" ? null : found;
  const start = Math.max(0, Math.min(from, queries - count));
  const before = useRef({ pinned, start });
  useLayoutEffect(() => {
    // it follows what is pinned, and stays where it is when nothing is pinned any more
    if (before.current.pinned !== pinned) setFrom(pinned === null ? before.current.start : null);
    before.current = { pinned, start };
  });
  const near = high - low + 1;
  const lines = near + first;
  const height = lines * LINE + 8 + 16;
  const side = (width - LEFT) / count;
  const name = (line: number) => (line < near ? distance(high - line) : `key ${line - near}`);
  const value = (query: number, line: number) => {
    const code = band!.codes[(query - band!.from) * lines + (line < near ? near - 1 - line : line)];
    return code === undefined || code === HIDDEN ? NaN : (code / 254) ** 2;
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
  const label = `Weights of ${nameOf(layer.index, state.head)} near the diagonal, queries ${start} to ${start + count - 1}`;
  const file = `headscope-layer-${layer.index}-head-${state.head}-strip`;
  const svg = () => {
    const surface = new SvgSurface();
    paint(surface);
    save(`${file}.svg`, new Blob([surface.written(width, height, label)], { type: "image/svg+xml" }));
  };
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
  const told = ({ query, line }: Cell) => {
    const key = line < near ? query + offset + high - line : line - near;
    const p = value(query, line);
    return `query ${position(layer, "query", query)} → key ${key < 0 || key >= keys ? "none" : position(layer, "key", key)}: ${p === p ? rough(p) : "may not be seen"}`;
  };
  const sizes = [20, 50, 100, 200, 500].filter((n) => n < queries);
  return (
    <div ref={frame}>
      <p class="switches">
        <label>queries from <NumberField min={0} max={Math.max(0, queries - count)} value={start} set={setFrom} /></label>
        <input type="range" aria-label="First query" min={0} max={Math.max(0, queries - count)} value={start} onInput={(event) => setFrom(event.currentTarget.valueAsNumber)} />
        {sizes.length > 0 && (
          <label>at a time <select value={count} onChange={(event) => change({ many: Number(event.currentTarget.value) })}>
            {[...new Set([...sizes, Math.min(queries, MOST_QUERIES), count])].sort((a, b) => a - b).map((n) => <option key={n} value={n}>{whole(n)}</option>)}
          </select></label>
        )}
        <button type="button" aria-label="PNG of the strip" onClick={() => canvas.current!.toBlob((blob) => blob && save(`${file}.png`, blob))}>PNG</button>
        {band && <button type="button" aria-label="SVG of the strip" onClick={svg}>SVG</button>}
      </p>
      <div class="banded">
        <canvas ref={canvas} class="band" tabIndex={0} role="img" aria-label={`${label}. Arrow keys choose a weight.`} style={{ width: `${width}px`, height: `${height}px` }}
          onMouseMove={point} onMouseLeave={() => setOver(null)} onKeyDown={pressed} onBlur={() => setOver(null)} />
        {at && <i style={{ left: `${LEFT + (at.query - start) * side}px`, top: `${top(at.line)}px`, width: `${side}px`, height: `${LINE - 1}px` }} />}
      </div>
      <p class="hint legend">
        <Bar what={`weight, ${state.scale}`} low={state.scale === "log" ? `≤ ${figure(1e-4)}` : "0"} high="1" colours={state.colours} />
        <span>A scale of its own, the same for every head.{oneOf(layer) && ` Of ${oneOf(layer)}.`}</span>
      </p>
      <p class="readout" role="status"><bdi>{failed || (at && band ? told(at) : "A column is a query; lines are keys by their distance from it, below them the first keys. Every weight is here, in 8 bits.")}</bdi></p>
    </div>
  );
}

function distance(by: number): string {
  return by === 0 ? "itself" : `${by < 0 ? "−" : "+"}${Math.abs(by)}`;
}

function shade(p: number, state: { scale: string; colours: Colours }): string {
  const at = state.scale === "log" ? Math.max(0, 1 + Math.log10(Math.max(p, 1e-9)) / 4) : p;
  return colour(at, state.colours).fill;
}

// ---------------------------------------------------------------- the largest weights of a row

type Largest = { each: number; p: Float32Array; keys: Uint32Array };

/** The keys that a query looks at most, exact: of the pinned query, where it is known, or the first one of a pinned row of bins. */
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
      <h4>The largest {top.each === 1 ? "weight" : "weights"} of query {stop - start > 1
        ? <NumberField label="Query" min={start} max={stop - 1} value={query} set={setAt} />
        : whole(query)} {hasTexts(layer) && <bdi>“{token(queryAt(layer, query), true)}”</bdi>}</h4>
      <ol class="largest">
        {found.map((n) => <li key={n}><b>{figure(top.p[n])}</b> key <bdi>{position(layer, "key", top.keys[n])}</bdi></li>)}
      </ol>
    </div>
  );
}

