// The largest single weights of a head.

import { type Edge, type Head, type Layer, range } from "./data";
import type { State } from "./state";
import { figure, strongest as texts } from "./texts";
import { binAt, mapValue, pair } from "./words";

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
  if (2 * telling.length >= edges.length || !map?.places || !layer.map!.ranges) return { list: telling.map((edge) => ({ ...edge, weight: figure(edge.p) })), cells: false };
  const { places, max, columns } = map;
  const list = Array.from(max.keys()).filter((n) => max[n] > 0).map((n) => {
    const [row, column] = [Math.floor(n / columns), n % columns];
    const query = places.query[n] + range(row, map.rows, layer.lengths![0])[0];
    const key = places.key[n] + range(column, columns, layer.lengths![1])[0];
    return { p: max[n], query, key, run: places.run[n], entry: places.entry[n], weight: mapValue(max[n]) };
  });
  return { list: list.filter((each) => !isTrivial(each)).sort((a, b) => b.p - a.p).slice(0, LISTED), cells: true };
}

export function Largest({ layer, head, change }: { layer: Layer; head: Head; change: (part: Partial<State>) => void }) {
  if (head.edges.length === 0) return null;
  const { list, cells } = connections(head, layer);
  if (list.length === 0) return null;
  const zoomTo = (query: number, key: number) => {
    const [row, column] = [binAt(layer, "query", query), binAt(layer, "key", key)];
    if (row === null || column === null) return;
    change({ row, column });
  };
  return (
    <details>
      <summary>{cells ? texts.ofCells(list.length) : texts.summary(list.length)}</summary>
      <ol class="largest">
        {list.map((each) => (
          <li key={`${each.run}.${each.entry}.${each.query}.${each.key}`}>
            <button type="button" onClick={() => zoomTo(each.query, each.key)}>
              <b>{each.weight}</b> <bdi>{pair(layer, each.query, each.key, each.run, each.entry)}</bdi>
            </button>
          </li>
        ))}
      </ol>
    </details>
  );
}
