// Numbers and places in words.

import { binOf, data, hasTokens, type Head, type Layer, queryAt, range, token } from "./data";

/** Three digits that count, or "–". */
export function figure(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return size < 1e-4 ? value.toExponential(digits - 1) : value.toPrecision(digits);
}

/** A value that is kept in 8 bits: more digits than these would not be its own. */
export function rough(value: number): string {
  return Number.isFinite(value) ? `≈ ${figure(value, 2)}` : "–";
}

/** A value of a map. */
export function kept(value: number): string {
  return data.bits === 8 ? rough(value) : figure(value);
}

export function whole(value: number): string {
  return value.toLocaleString("en-US");
}

function plural(count: number, word: string): string {
  return count === 1 ? word : word === "query" ? "queries" : `${word}s`;
}

/** "1 row", "2,048 rows". */
export function counted(count: number, word: string): string {
  return `${whole(count)} ${plural(count, word)}`;
}

/** The next of 1, 2, 5, 10, … */
export function step(least: number): number {
  const ten = 10 ** Math.max(0, Math.floor(Math.log10(Math.max(1, least))));
  return [1, 2, 5, 10].map((each) => each * ten).find((each) => each >= least) ?? 10 * ten;
}

export function layerName(layer: number): string {
  const { short } = data.layers[layer];
  return /^\d+$/.test(short) ? `layer ${short}` : short;
}

/** A name in parts, between which a line may end: behind a dot or an underscore. */
export function parts(name: string): string[] {
  return name.split(/(?<=[._])/);
}

/** A head by its layer and number. */
export function nameOf(layer: number, head: number): string {
  return `${layerName(layer)}, head ${head}`;
}

/** A position with its token, if there is one. */
export function position(layer: Layer, axis: "query" | "key", at: number): string {
  const text = hasTokens(layer) ? token(axis === "query" ? queryAt(layer, at) : at, true) : null;
  return text === null ? whole(at) : `${whole(at)} “${text}”`;
}

/** A bin of an axis: "query 5 “the”", "keys 512–1,023". */
export function bin(layer: Layer, axis: "query" | "key", at: number): string {
  const map = layer.map!;
  const bins = axis === "query" ? map.rows : map.columns;
  if (!map.ranges) return `${axis} bin ${at} of ${bins}`;
  const [start, stop] = range(at, bins, layer.lengths![axis === "query" ? 0 : 1]);
  if (stop - start === 1) return `${axis} ${position(layer, axis, start)}`;
  return `${plural(2, axis)} ${whole(start)}–${whole(stop - 1)}`;
}

/** Where the largest weight of a bin stands. */
export function argmax(layer: Layer, head: Head, row: number, column: number): string {
  const map = head.map!;
  const places = map.places;
  if (!places) return "";
  const n = row * map.columns + column;
  const said = layer.map!;
  let [query, key] = [places.query[n], places.key[n]];
  if (said.ranges) {
    query += range(row, map.rows, layer.lengths![0])[0];
    key += range(column, map.columns, layer.lengths![1])[0];
  }
  return pair(layer, query, key, places.run[n], places.entry[n]);
}

/** Query and key, and which text of several they are in. */
export function pair(layer: Layer, query: number, key: number, run: number, entry: number): string {
  const one = layer.runs === 1;
  const where = [one ? "" : `run ${run}`, single(layer) ? "" : `text ${entry}`].filter(Boolean).join(", ");
  const tokens = one && single(layer);
  const name = (axis: "query" | "key", at: number) => (tokens ? position(layer, axis, at) : whole(at));
  return `query ${name("query", query)} → key ${name("key", key)}${where ? ` (${where})` : ""}`;
}

/** Whether each call had one text. */
function single(layer: Layer): boolean {
  return layer.lengths !== null && layer.of === layer.runs * layer.lengths[0];
}

/** What tiles and strips are of, where the map is of more. */
export function oneOf(layer: Layer): string {
  return layer.lengths !== null && layer.of === layer.lengths[0] ? "" : "the first input of the last call";
}

/** What a bin of the map is. */
export function binning(layer: Layer): string {
  const map = layer.map!;
  if (map.exact) return "Each cell is one weight.";
  if (!map.ranges) return `Pooled: ${map.rows} × ${map.columns} bins over calls of different lengths, each in proportion.`;
  const [queries, keys] = layer.lengths!;
  const inputs = layer.of / queries;
  const over = inputs > 1 ? ` over ${whole(inputs)} inputs` : "";
  if (queries === map.rows && keys === map.columns) return `Each cell is one query and key, pooled${over}.`;
  const each = (length: number, bins: number) => {
    const size = length / bins;
    return size <= 1 ? "1" : Number.isInteger(size) ? whole(size) : `${Math.floor(size)}–${Math.ceil(size)}`;
  };
  return `Pooled: a bin stands for ${each(queries, map.rows)} × ${each(keys, map.columns)} pairs of query and key${over}.`;
}

/** The bin of a query or key. */
export function binAt(layer: Layer, axis: "query" | "key", at: number): number | null {
  const map = layer.map;
  if (!map?.ranges) return null;
  return axis === "query" ? binOf(at, map.rows, layer.lengths![0]) : binOf(at, map.columns, layer.lengths![1]);
}

export function statistic(layer: number, head: number, name: string): number | null {
  if (name === "score") return data.patterns[layer]?.[head]?.[0]?.[1] ?? null;
  return data.statistics[layer][name]?.mean[head] ?? null;
}
