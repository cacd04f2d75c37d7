// Pictures in words: what a reader sees on a canvas, for one who does not see it.

import { data, type Head, hasTokens, type Layer, queryAt, range, token } from "./data";
import type { Field } from "./field";
import { alsoInWords, degreeOf, NAMED } from "./naming";
import { described, names, patterns, percent, whole } from "./texts";
import { bin, FIRST_COLUMN, mapValue } from "./words";

const PAIRS = 3;
const LEAST = 0.05; // of the weight on the first key that is worth a mention

/** What patterns count: tokens, or patches where all keys are. */
export const UNIT = data.image?.special === 0 ? "patch" : "token";

/** A map: its size, the pattern of the head, the weight on the first key, the strongest pairs. `number`: of the head; without it, a difference. */
export function describeMap(layer: Layer, head: Head, field: Field, title: string, number?: number): string {
  const parts = [sizeOf(layer, field)];
  if (!field.signed && number !== undefined) {
    const best = data.patterns[layer.index]?.[number]?.[0];
    if (best) parts.push(best[1] < NAMED ? described.noPattern : described.likeness(patterns[best[0]]?.(UNIT).kind ?? best[0], percent(best[1]) + alsoInWords(data.also[layer.index]?.[number]), degreeOf(best[1])));
    const share = meanOf(head.map!.firstShare);
    if (share >= LEAST && UNIT === "token") parts.push(described.first(percent(share), FIRST_COLUMN));
  }
  const pairs = strongest(layer, field);
  parts.push(pairs.length === 0 ? described.empty : (field.signed ? described.difference : described.strongest)(pairs.join(described.also)));
  return described.join(names.title(title), parts);
}

function sizeOf(layer: Layer, { rows, columns }: Field): string {
  if (!layer.map!.ranges || !layer.lengths) return described.bins(rows, columns);
  const [queries, keys] = layer.lengths;
  return queries === rows && keys === columns ? described.size(queries, keys) : described.pooled(rows, columns, queries, keys);
}

function meanOf(values: Float32Array): number {
  const known = values.filter((value) => value === value);
  return known.reduce((sum, value) => sum + value, 0) / (known.length || 1);
}

/** The cells with the largest values, without the rows that have a single one: they are 1 in every head. */
function strongest(layer: Layer, { rows, columns, values, signed }: Field): string[] {
  const best: { size: number; value: number; row: number; column: number }[] = [];
  for (let row = 0; row < rows; row++) {
    let visible = 0;
    for (let column = 0; column < columns && visible < 2; column++) if (values[row * columns + column] === values[row * columns + column]) visible++;
    if (visible < 2 && !signed) continue;
    for (let column = 0; column < columns; column++) {
      const value = values[row * columns + column];
      const size = Math.abs(value);
      if (!(size > (best.length < PAIRS ? 0 : best[PAIRS - 1].size))) continue;
      best.push({ size, value, row, column });
      best.sort((a, b) => b.size - a.size).splice(PAIRS);
    }
  }
  return best.map(({ value, row, column }) => pairOf(layer, row, column, mapValue(value)));
}

function pairOf(layer: Layer, row: number, column: number, value: string): string {
  const [query, key] = [nameOf(layer, "query", row), nameOf(layer, "key", column)];
  return query === key && hasTokens(layer) ? described.selfPair(query, value) : described.pair(query, key, value);
}

/** A bin by its token, "‘cat’ (5)", or by its numbers. */
function nameOf(layer: Layer, axis: "query" | "key", at: number): string {
  const map = layer.map!;
  const [start, stop] = map.ranges ? range(at, axis === "query" ? map.rows : map.columns, layer.lengths![axis === "query" ? 0 : 1]) : [at, at];
  const text = stop - start === 1 && hasTokens(layer) ? token(axis === "query" ? queryAt(layer, start) : start, true) : null;
  if (text === null) return bin(layer, axis, at);
  return data.image ? text : described.token(text, whole(start));
}
