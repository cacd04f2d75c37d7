// A recording as it is compared with another: this page's own, one that the page came with, or one from a file.

import { Blocks, bytes, type Data, data, type Head, type Layer, type Origin, ownHeads, read } from "./data";

/** The sums that distances between two heads are computed from. */
export interface Sums {
  map: Float64Array | null; // weight of each bin, row by row
  received: Float64Array | null; // weight of each key
}

export interface Means {
  names: string[];
  mean: (query: number, key: number) => number; // NaN where there is none
  rows: (query: number) => number;
  withoutFirst: ((query: number, key: number) => number) | null; // null = unknown
  holders: number[]; // the segments that hold a first key
}

export interface Side {
  title: string;
  layers: Layer[];
  names: Data["names"];
  statistics: Data["statistics"];
  tokens: Data["tokens"];
  runTokens: Data["runTokens"];
  named: Pick<Data, "patterns" | "also" | "highlights" | "few"> | null; // null where the page does not know what its heads are named
  origin: Origin | null;
  head: (layer: number, head: number) => Promise<Head>;
  sums: (layer: number, head: number) => Promise<Sums>;
  segments: (layer: number, head: number) => Means | null;
}

/** The name of a layer as its model has it. */
export function keyOf(layer: Layer): string {
  return layer.key ?? layer.name;
}

/** What a page needs of its own data, or of that of another page. */
export type PageData = Pick<Data, "layers" | "masks" | "bits" | "names" | "statistics" | "tokens"> & Partial<Pick<Data, "title" | "origin" | "numbers" | "runTokens" | "patterns" | "also" | "highlights" | "few">>;

/** The whole numbers of a list of runs: of each its first number, its step and its length. */
function expanded(runs: number[]): Float64Array {
  let length = 0;
  for (let n = 2; n < runs.length; n += 3) length += runs[n];
  const found = new Float64Array(length);
  let at = 0;
  for (let n = 0; n < runs.length; n += 3) for (let m = 0; m < runs[n + 2]; m++) found[at++] = runs[n] + m * runs[n + 1];
  return found;
}

function sumsOf(from: PageData): (layer: Layer, head: number, decoded: Head) => Sums {
  const known = new Map<number, Float64Array>();
  const list = (which: number): Float64Array => {
    const found = known.get(which) ?? expanded(from.numbers![which]);
    known.set(which, found);
    return found;
  };
  return (layer, head, { map, received }) => {
    const counts = layer.counts ? list(layer.counts[head]) : null;
    const rows = layer.eligible ? list(layer.eligible[head]) : null;
    return {
      map: map && (counts || layer.map!.exact) ? Float64Array.from(map.mean, (mean, n) => (mean === mean ? mean * (counts ? counts[n] : 1) : 0)) : null,
      received: rows && received.length > 0 ? Float64Array.from(received, (value, n) => (value === value ? value * rows[n] : 0)) : null,
    };
  };
}

function segmentsOf(layers: Layer[]): Side["segments"] {
  const codes = new Map<string, Uint16Array>();
  return (at, head) => {
    const facts = layers[at].segments;
    if (!facts) return null;
    const size = facts.names.length;
    const shares = (which: "mean" | "withoutFirst") => {
      if (!codes.has(which + at)) {
        const packed = bytes(facts[which]!);
        codes.set(which + at, new Uint16Array(packed.buffer, 0, packed.length >> 1));
      }
      return (query: number, key: number) => {
        const code = codes.get(which + at)![(head * size + query) * size + key];
        return code === 0xffff ? NaN : code / 0xfffe;
      };
    };
    const known = (facts.withoutFirst ?? null) !== null; // pages of earlier versions lack it
    return { names: facts.names, mean: shares("mean"), rows: (query) => facts.rows[head][query], withoutFirst: known ? shares("withoutFirst") : null, holders: facts.holders ?? [] };
  };
}

function factsOf(from: PageData): Omit<Side, "head" | "sums" | "segments"> {
  const { layers, names, statistics, tokens, patterns, also, highlights, few } = from;
  return {
    title: from.title ?? "", layers, names, statistics, tokens, runTokens: from.runTokens ?? null, origin: from.origin ?? null,
    named: patterns && also && highlights ? { patterns, also, highlights, few } : null, // the second recording of a page of an earlier version lacks them
  };
}

let mine: Side | null = null;

/** This page's own recording. */
export function ownSide(): Side {
  if (!mine) {
    const from = { ...data }; // what the page shows may be the other recording later
    const sums = sumsOf(from);
    mine = {
      ...factsOf(from), head: (layer, number) => ownHeads.get(layer, number),
      sums: async (layer, head) => sums(from.layers[layer], head, await read(from.layers[layer], head)),
      segments: segmentsOf(from.layers),
    };
  }
  return mine;
}

/** The recording of another page, from its data and its blocks. */
export function pageSide(from: PageData, content: string): Side {
  const blocks = new Blocks(content, from.bits, from.masks);
  from.layers.forEach((layer, index) => {
    layer.index = index;
    layer.other = { tokens: from.tokens, bits: from.bits };
  });
  const sums = sumsOf(from);
  const head = cached((layer, number) => read(from.layers[layer], number, blocks));
  return {
    ...factsOf(from), head,
    sums: async (layer, number) => sums(from.layers[layer], number, await read(from.layers[layer], number, blocks)),
    segments: segmentsOf(from.layers),
  };
}

const CACHED = 48;

/** Heads that stay decoded: the last ones that were asked for. */
export function cached(get: (layer: number, head: number) => Promise<Head>): Side["head"] {
  const heads = new Map<string, Promise<Head>>();
  return (layer, head) => {
    const key = `${layer}.${head}`;
    const found = heads.get(key) ?? get(layer, head);
    heads.delete(key);
    heads.set(key, found);
    if (heads.size > CACHED) heads.delete(heads.keys().next().value!);
    return found;
  };
}
