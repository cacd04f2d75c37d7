// The largest single weights of a head.

import { type Edge, type Head, type Layer, range } from "./data";
import { embedded } from "./exact";
import type { State } from "./state";
import { figure, strongest as texts } from "./texts";
import { binIn, mapValue, pair, windowsOf } from "./words";

const LISTED = 10; // cells, where the largest weights say nothing

interface Connection {
  query: number;
  key: number;
  run: number;
  entry: number;
  weight: string;
  p: number;
}

/** The largest weights. Where each of several texts begins with a query that has one visible key, these weights are 1 and say nothing:
 * then the largest of the cells. */
export function connections({ edges, map }: Head, layer: Layer): { list: Connection[]; cells: boolean } {
  const alone = !!map && map.columns > 1 && Number.isNaN(map.mean[map.columns - 1]); // later keys are masked
  const isTrivial = ({ query, key }: Pick<Edge, "query" | "key">) => alone && query === 0 && key === 0;
  const telling = edges.filter((edge) => !isTrivial(edge));
  if (2 * telling.length >= edges.length || !map?.places) return { list: telling.map((edge) => ({ ...edge, weight: figure(edge.p) })), cells: false };
  const { places, max, columns } = map;
  const list = Array.from(max.keys()).filter((n) => max[n] > 0).map((n) => {
    const start = (bin: number, bins: number, axis: 0 | 1) => (layer.map!.ranges ? range(bin, bins, layer.lengths![axis])[0] : 0); // without ranges places are positions
    const query = places.query[n] + start(Math.floor(n / columns), map.rows, 0);
    const key = places.key[n] + start(n % columns, columns, 1);
    return { p: max[n], query, key, run: places.run[n], entry: places.entry[n], weight: mapValue(max[n]) };
  });
  return { list: list.filter((each) => !isTrivial(each)).sort((a, b) => b.p - a.p).slice(0, LISTED), cells: true };
}

export function Largest({ layer, head, number, change }: { layer: Layer; head: Head; number: number; change: (part: Partial<State>) => void }) {
  if (head.edges.length === 0) return null;
  const { list, cells } = connections(head, layer);
  if (list.length === 0) return null;
  /** The cell of a weight, and the window that it is from; null where the page does not know the lengths of the calls. */
  const placeOf = ({ query, key, run }: Connection): Partial<State> | null => {
    const [row, column] = [binIn(layer, "query", query, run), binIn(layer, "key", key, run)];
    return row === null || column === null ? null : { row, column, ...(windowsOf(layer) > 0 ? { window: run, cell: embedded(layer, number, run) ? [query, key] : null } : {}) };
  };
  return (
    <details>
      <summary>{cells ? texts.ofCells(list.length) : texts.summary(list.length)}</summary>
      <ol class="largest">
        {list.map((each) => {
          const [place, text] = [placeOf(each), <><b>{each.weight}</b> <bdi>{pair(layer, each.query, each.key, each.run, each.entry)}</bdi></>];
          return (
            <li key={`${each.run}.${each.entry}.${each.query}.${each.key}`}>
              {place ? <button type="button" onClick={() => change(place)}>{text}</button> : text}
            </li>
          );
        })}
      </ol>
    </details>
  );
}
