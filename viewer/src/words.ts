// Names of places: which head, query, key or cell. The texts themselves are in texts.ts.

import { binOf, data, hasTokens, type Head, type Layer, queryAt, range, token } from "./data";
import { type Field, hasQuantile } from "./field";
import { figure, type FirstColumn, legend, names, rough, whole } from "./texts";

/** The content of the first column of the maps. */
export const FIRST_COLUMN: FirstColumn = data.image ? "CLS" : data.layers.every((layer) => !layer.map || (layer.lengths && layer.map.columns === layer.lengths[1])) ? "token" : "bin";

/** The token at a position of a run; null where the texts of the runs are not known. */
export function tokenOf(layer: Layer, run: number, at: number): string | null {
  const tokens = data.runTokens;
  if (!tokens || layer.other || layer.kind !== "self" || layer.runs !== tokens.ids.length) return null;
  return tokens.labels[tokens.ids[run]?.[at]] ?? null;
}

/** A value of a map, marked if it is stored in 8 bits. */
export function mapValue(value: number, layer?: Layer): string {
  return (layer?.other?.bits ?? data.bits) === 8 ? rough(value) : figure(value);
}

/** The next of 1, 2, 5, 10, … */
export function step(least: number): number {
  const ten = 10 ** Math.max(0, Math.floor(Math.log10(Math.max(1, least))));
  return [1, 2, 5, 10].map((each) => each * ten).find((each) => each >= least) ?? 10 * ten;
}

export function layerName(layer: number): string {
  return names.layer(data.layers[layer].short);
}

/** A name in parts, between which a line may end: behind a dot or an underscore. */
export function parts(name: string): string[] {
  return name.split(/(?<=[._])/);
}

/** A head by its layer and number. */
export function nameOf(layer: number, head: number): string {
  return names.head(layerName(layer), head);
}

/** A position with its token, if there is one; `window`: of a text that was read in windows. */
export function position(layer: Layer, axis: "query" | "key", at: number, window: number | null = null): string {
  const text = window !== null ? tokenOf(layer, window, at) : hasTokens(layer) ? token(axis === "query" ? queryAt(layer, at) : at, true, layer) : null;
  return text === null ? whole(at) : names.quoted(at, text);
}

/** A bin of an axis: "query 5 “the”", "keys 512–1,023". */
export function bin(layer: Layer, axis: "query" | "key", at: number): string {
  const map = layer.map!;
  const bins = axis === "query" ? map.rows : map.columns;
  if (!map.ranges) return names.bin(axis, at, bins);
  const [start, stop] = range(at, bins, layer.lengths![axis === "query" ? 0 : 1]);
  return stop - start === 1 ? names.one(axis, position(layer, axis, start)) : names.several(axis, start, stop - 1);
}

/** The query and key of the largest weight of a bin. */
export function argmax(layer: Layer, head: Head, row: number, column: number): string {
  const map = head.map!;
  const places = map.places;
  if (!places) return "";
  const n = row * map.columns + column;
  let [query, key] = [places.query[n], places.key[n]];
  if (layer.map!.ranges) {
    query += range(row, map.rows, layer.lengths![0])[0];
    key += range(column, map.columns, layer.lengths![1])[0];
  }
  return pair(layer, query, key, places.run[n], places.entry[n]);
}

/** Query and key, and which text of several they are in. */
export function pair(layer: Layer, query: number, key: number, run: number, entry: number): string {
  const one = layer.runs === 1;
  const tokens = one && single(layer);
  const texts = [query, key].map((at) => tokenOf(layer, run, at));
  if (texts[0] !== null && texts[1] !== null) {
    return names.pair(names.quoted(query, texts[0]), names.quoted(key, texts[1]), run, null, true);
  }
  const name = (axis: "query" | "key", at: number) => (tokens ? position(layer, axis, at) : whole(at));
  return names.pair(name("query", query), name("key", key), one ? null : run, single(layer) ? null : entry, windowsOf(layer) > 0);
}

/** Whether each call had one text. */
function single(layer: Layer): boolean {
  return layer.lengths !== null && layer.of === layer.runs * layer.lengths[0];
}

/** The input that tiles and strips belong to, where the map covers more than one; `window`: of a text that was read in windows. */
export function oneOf(layer: Layer, window: number | null = null): string {
  if (window !== null) return names.inWindow(window);
  return layer.lengths !== null && layer.of === layer.lengths[0] ? "" : names.firstInput;
}

/** In how many windows the model read the text of a layer; 0 where its runs are something else. */
export function windowsOf(layer: Layer): number {
  const tokens = data.runTokens;
  return tokens && !layer.other && layer.kind === "self" && layer.runs === tokens.ids.length ? layer.runs : 0;
}

/** Whether the page holds the texts of the windows in which a text was read. */
export const HAS_WINDOWS = data.layers.some((layer) => windowsOf(layer) > 0);

/** What a map without its first column shows; "" for others. */
export function withoutFirst(layer: Layer, { sink, pool }: { sink: boolean; pool: "mean" | "max" }): string {
  return sink ? legend.sink(FIRST_COLUMN, pool === "mean" || layer.map!.exact) : "";
}

/** How many weights a cell of the map pools. */
export function binning(layer: Layer, pool: "mean" | "max"): string {
  const map = layer.map!;
  if (map.exact) return legend.oneWeight;
  const windows = windowsOf(layer);
  const over = (inputs: number) => (windows > 1 ? legend.windows(windows) : inputs > 1 ? legend.inputs(inputs) : "");
  if (!map.ranges) return legend.proportional(pool, map.rows, map.columns, over(1));
  const [queries, keys] = layer.lengths!;
  const inputs = over(layer.of / queries);
  if (queries === map.rows && keys === map.columns) return legend.onePair(pool, inputs);
  const each = (length: number, bins: number) => {
    const size = length / bins;
    return size <= 1 ? "1" : Number.isInteger(size) ? whole(size) : legend.between(Math.floor(size), Math.ceil(size));
  };
  return legend.pairs(pool, each(queries, map.rows), each(keys, map.columns), inputs);
}

/** How the colours of a map with many cells are chosen; `pixels`: from how many rows or columns it may have fewer pixels than cells. */
export function ending({ rows, columns }: Pick<Field, "rows" | "columns">, pixels = 256): string {
  return [hasQuantile({ rows, columns }) && legend.quantile, Math.max(rows, columns) > pixels && legend.pixel].filter(Boolean).join(" ");
}

/** The bin of a query or key. */
export function binAt(layer: Layer, axis: "query" | "key", at: number): number | null {
  const map = layer.map;
  if (!map?.ranges) return null;
  return axis === "query" ? binOf(at, map.rows, layer.lengths![0]) : binOf(at, map.columns, layer.lengths![1]);
}

/** The bin of a query or key of one run: where windows have different lengths, a bin is a share of each. */
export function binIn(layer: Layer, axis: "query" | "key", at: number, run: number): number | null {
  const length = windowsOf(layer) > 0 ? data.runTokens!.ids[run]?.length : undefined;
  const map = layer.map;
  if (!map || map.ranges || length === undefined) return binAt(layer, axis, at);
  return at < length ? binOf(at, axis === "query" ? map.rows : map.columns, length) : null;
}

export function statistic(layer: number, head: number, name: string): number | null {
  if (name === "score") return data.patterns[layer]?.[head]?.[0]?.[1] ?? null;
  return data.statistics[layer][name]?.mean[head] ?? null;
}

const CLEAR = 1.2; // ratios to chance from which a region is named, as in the terminal

/** Whether a head looks at a region clearly more than by chance; by the ratio as it is shown. */
export function isClear(look: [string, number] | null | undefined): look is [string, number] {
  return !!look && Number(look[1].toFixed(1)) >= CLEAR;
}
