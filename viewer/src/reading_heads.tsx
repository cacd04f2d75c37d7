// One token in all heads at once: a table of layers and heads, in each cell the key that the token attends to most.

import { useEffect, useRef, useState } from "preact/hooks";
import { data, type Head, HAS_READING, type Layer, NONE, onOtherData, passing, queryAt, readable, token } from "./data";
import { all } from "./grid";
import type { Place } from "./reading_lines";
import { useRoving } from "./roving";
import type { State } from "./state";
import { everyHead as texts, fill, grid, names, percent, whole } from "./texts";
import { layerName, nameOf, parts } from "./words";

const MOST_HEADS = 600; // of which a table can be read
const MOST_ROWS = 2 ** 22; // queries of all heads whose largest weights are held: 8 bytes each
const HELD = 30; // milliseconds between two looks at what else there is to do

const WIDEST = Math.max(...data.layers.map(({ heads }) => heads));

/** Whether the page holds the largest weight of each query of all heads. */
export const HAS_EVERY = HAS_READING && data.layers.every(readable) && all().length > 1 && all().length <= MOST_HEADS &&
  data.layers.reduce((sum, { heads, lengths }) => sum + heads * lengths![0], 0) <= MOST_ROWS;

/** Of each query of a head the key with the largest weight; NONE where there is none. */
interface Largest {
  keys: Uint32Array;
  p: Float32Array;
}

let largest: Largest[][] = data.layers.map(() => []);
onOtherData(() => (largest = data.layers.map(() => [])));

function largestOf(layer: Layer, { map, top }: Head): Largest {
  const [queries, length] = layer.lengths!;
  const found = { keys: new Uint32Array(queries).fill(NONE), p: new Float32Array(queries) };
  const each = map && layer.map!.exact ? length : (top?.each ?? 0);
  for (let query = 0; query < queries; query++) {
    for (let n = query * each; n < (query + 1) * each; n++) {
      const [p, key] = map && layer.map!.exact ? [map.mean[n], n - query * each] : [top!.p[n], top!.keys[n]];
      if (key !== NONE && p > found.p[query]) [found.p[query], found.keys[query]] = [p, key];
    }
  }
  return found;
}

/** Reads all heads, a few at a time, and renders again when there are more. */
function useLargest(): void {
  const [, setRead] = useState(0);
  useEffect(() => {
    let stale = false;
    const found = largest;
    const read = async () => {
      let until = performance.now() + HELD;
      for (const [n, { layer, head }] of all().entries()) {
        if (stale) return;
        found[layer][head] ??= largestOf(data.layers[layer], await passing(layer, head));
        if (performance.now() < until) continue;
        setRead(n);
        await new Promise<unknown>((done) => setTimeout(done));
        until = performance.now() + HELD;
      }
      if (!stale) setRead(Infinity);
    };
    void read();
    return () => void (stale = true);
  }, []);
}

const repeated = new Map<string, boolean>(); // of the text of a token: whether it occurs more than once
onOtherData(() => repeated.clear());

function isRepeated(at: number): boolean {
  if (repeated.size === 0) for (const label of data.tokens!.labels) repeated.set(label, repeated.has(label));
  return repeated.get(data.tokens!.labels[at])!;
}

interface Props {
  at: number; // the token
  toward: State["toward"]; // of the lines: the table is of keys, whatever it is
  shown: Place;
  preview: (place: Place | null) => void; // the lines of a head while it is pointed at
  choose: (place: Place) => void;
}

export function EveryHead({ at, toward, shown, preview, choose }: Props) {
  useLargest();
  const frame = useRef<HTMLTableElement>(null);
  return (
    <div class="every-head">
      <p class="hint">{fill(texts.title, { token: <b><bdi>{names.inQuotes(token(at, true)!)}</bdi></b>, at: whole(at) })} {toward !== "from" && texts.always}</p>
      <div class="scroll" tabIndex={0} role="region" aria-label={texts.label}>
        <table aria-label={texts.label} ref={frame} onMouseLeave={() => preview(null)} {...useRoving(frame, "button", { first: "[aria-current]" })}>
          <thead><tr><td class="corner"><small>{grid.head} →<br />{grid.layer} ↓</small></td>{Array.from({ length: WIDEST }, (_, head) => <th scope="col" key={head}>{head}</th>)}</tr></thead>
          <tbody>
            {data.layers.map((layer, n) => (
              <tr key={n}>
                <th scope="row" aria-label={layerName(n)}>{parts(layer.short).map((part) => <>{part}<wbr /></>)}</th>
                {Array.from({ length: layer.heads }, (_, head) => (
                  <td key={head}><Cell {...{ place: [n, head], at, preview, choose }} current={n === shown[0] && head === shown[1]} /></td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </div>
  );
}

function Cell({ place, at, current, preview, choose }: Omit<Props, "shown" | "toward"> & { place: Place; current: boolean }) {
  const [layer, head] = place;
  const query = at - queryAt(data.layers[layer], 0);
  const found = largest[layer][head];
  const key = found && query >= 0 && query < found.keys.length ? found.keys[query] : NONE;
  const p = key === NONE ? 0 : found.p[query];
  const name = nameOf(layer, head);
  const text = key === NONE ? texts.none(name) : texts.cell(name, names.quoted(key, token(key, true)!), percent(p));
  return (
    <button type="button" aria-label={text} title={text} aria-current={current ? "true" : undefined} data-layer={layer} data-head={head}
      style={{ background: `color-mix(in srgb, var(--line-1) ${Math.round(45 * p)}%, var(--panel))` }}
      onMouseEnter={() => preview(place)} onFocus={() => preview(place)} onBlur={() => preview(null)} onClick={() => choose(place)}>
      {key !== NONE && <><bdi>{token(key)}{isRepeated(key) && <sub>{whole(key)}</sub>}</bdi><small>{percent(p)}</small></>}
    </button>
  );
}
