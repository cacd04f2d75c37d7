// Exact pieces of the weights: from the server that the page came from, or from q and k in the page.

import { data, type Layer } from "./data";
import { embedded, exactTile } from "./exact";
import { type Field, type Pool, topOf } from "./field";
import { server } from "./texts";

const MOST_PAIRS = 2 ** 26; // that the server computes at once
export const MOST_PAIRS_HERE = 2 ** 24; // and the page: about half a second
const LARGEST = 512;

export interface Tile {
  layer: number;
  head: number;
  window: number | null; // of a text that was read in windows
  lengths: [number, number]; // of its run
  queries: [number, number];
  keys: [number, number];
  rows: number;
  columns: number;
  mean: Float32Array;
  max: Float32Array;
}

/** How many queries and keys the run has that the tiles of a layer show; null where no server has tiles, nor the page of this head and window. */
export function served(layer: Layer, head?: number, window: number | null = null): [number, number] | null {
  return data.served?.[layer.index] ?? (head === undefined ? null : embedded(layer, head, window)?.lengths) ?? null;
}

/** Whether each cell of a tile is one weight. */
export function isExact(tile: Tile): boolean {
  return tile.rows === tile.queries[1] - tile.queries[0] && tile.columns === tile.keys[1] - tile.keys[0];
}

async function ask(what: string, given: Record<string, number>, signal?: AbortSignal): Promise<ArrayBuffer> {
  const params = new URLSearchParams(Object.entries(given).map(([name, value]) => [name, String(value)]));
  const answer = await fetch(`${what}?${params}`, signal ? { signal } : {});
  if (!answer.ok) throw new Error((await answer.text()).trim());
  return answer.arrayBuffer();
}

/** Why a request failed, in a sentence. */
export function why(error: unknown): string {
  if (error instanceof TypeError) return server.stopped; // fetch could not reach it
  return error instanceof Error ? error.message : String(error);
}

/** These queries and keys, or null where nobody computes them, or not as many at once. */
export async function tile(layer: Layer, head: number, queries: [number, number], keys: [number, number], signal: AbortSignal, window: number | null = null): Promise<Tile | null> {
  const [high, wide] = [queries[1] - queries[0], keys[1] - keys[0]];
  const lengths = served(layer, head, window);
  const here = data.served?.[layer.index] ? null : embedded(layer, head, window);
  if (!lengths || high * wide > (here ? MOST_PAIRS_HERE : MOST_PAIRS) || high < 1 || wide < 1) return null;
  const [rows, columns] = [Math.min(LARGEST, high), Math.min(LARGEST, wide)];
  if (here) return { layer: layer.index, head, window, lengths, queries, keys, rows, columns, ...(await exactTile(here, queries, keys, LARGEST, signal)) };
  const given = { layer: layer.index, head, i0: queries[0], i1: queries[1], j0: keys[0], j1: keys[1], size: LARGEST };
  const values = new Float32Array(await ask("tile", given, signal));
  const cells = rows * columns;
  return { layer: layer.index, head, window: null, lengths, queries, keys, rows, columns, mean: values.subarray(0, cells), max: values.subarray(cells) };
}

/** As a field with a scale of its own: single weights are often far from the means of bins. */
export function asField(from: Tile, pool: Pool): Field {
  const { rows, columns } = from;
  const values = pool === "max" ? from.max : from.mean;
  return { rows, columns, values, ...topOf(values, rows, columns), pool, signed: false, sink: false };
}

/** The strip of some queries of a head. */
export async function stripOf(layer: Layer, head: number, queries: [number, number]): Promise<Uint8Array> {
  return new Uint8Array(await ask("strip", { layer: layer.index, head, i0: queries[0], i1: queries[1] }));
}
