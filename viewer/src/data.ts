// What the page holds: the description as JSON, and a block of bytes for each head that is read when it is first shown.
// The layout of a block is that of src/headscope/report/_viewer/packing.py.

import type { ExactHead } from "./exact_worker";
import type { HistoryFacts } from "./history_data";
import { names } from "./texts";

export interface MapFacts {
  rows: number;
  columns: number;
  exact: boolean; // each bin is one weight
  ranges: boolean; // whether the positions of a bin are known
  masks: number[];
  widths: [number, number, number, number]; // bytes of query, key, run, batch entry of a bin's max
  levels: number[] | null; // of each head: fewer than FULL where the weights of a row are shares of its largest
}

export interface StripsFacts {
  lengths: [number, number]; // of their run
  offset: number; // the position of query 0 among the keys
  low: number; // the distances key - query that the strip holds, both inclusive
  high: number;
  first: number; // how many of the first keys
  heads: Record<string, [number, number]>;
}

export interface Layer {
  index: number;
  name: string;
  key?: string; // the name as the model has it, where it is not shown so
  short: string;
  kind: string;
  heads: number;
  lengths: [number, number] | null;
  runs: number;
  lookedAt: number;
  of: number;
  rows: number[];
  broken: number[];
  blocks: [number, number][];
  received: number;
  receivedOf: number;
  entropy: number;
  entropyOf: number;
  edges: number;
  top: [] | [number, number]; // queries, and how many weights of each
  map: MapFacts | null;
  strips: StripsFacts | null;
  segments: SegmentFacts | null;
  first?: number | null; // how many first keys `first` and `streaming_w` count
  bins?: number | null; // n of the map
  counts?: number[] | null; // of each head which of `numbers` are the pairs in each bin; null = 1 in each visible one
  eligible?: number[] | null; // likewise, of each key the rows to which it is visible
  other?: Texts; // of a layer of the recording that the page is compared with: its own texts
}

/** What the positions of another recording are. */
export interface Texts {
  tokens: Data["tokens"];
  bits: number; // of its maps' codes
}

/** The weight between named segments. */
export interface SegmentFacts {
  names: string[];
  mean: string; // base64 of 16 bits each: head, segment of the query, segment of the key; in units of 1 / 65,534, 65,535 = none
  rows: number[][]; // of each head and segment
  spans: [number, number, number][]; // segment, first key, first key after it; none where inputs differ
  images: { name: string; columns: number; rows: number[] }[]; // of each row of patches the first key
  even: string | null; // as mean: the share if rows spread their weight evenly over the keys they may attend to
  evenExact: boolean; // not estimated from bins of several tokens
  clear: string | null; // base64 of a byte each, as mean: whether chance does not explain the share; null = unknown
  withoutFirst: string | null; // as mean: the share without the first key; null = unknown
  holders: number[]; // the segments that hold a first key
}

/** The image whose patches the keys are. */
export interface ImageFacts {
  height: number;
  width: number;
  rgb: string;
  grid: [number, number];
  special: number; // keys before the patches: CLS, registers
  outline: number[];
  regions: Record<string, number[]>;
  regionWords: Record<string, { heading: string; meaning: string }>;
  looks: ([string, number] | null)[][];
  clear: (string | null)[][]; // the region of each head that cards count
  fixed?: boolean[][]; // whether the rows of each head are nearly the same; pages of earlier versions lack it
}

export interface Step {
  step: string;
  equation: string;
  code: string;
  dtype: string;
  invariant: string;
  why: string;
  mistake: string;
  note: string;
  axes: [string, number][];
  corner: string[][] | null;
  held: boolean | null;
}

export interface TableFacts {
  title: string;
  says: string;
  columns: string[];
  words: boolean[];
  cells: string[][];
  caption: string;
}

export type What = "mean" | "std" | "min" | "max" | "count";

export interface Data {
  about: [string, string]; // the model and the input; empty where they are not known
  layers: Layer[];
  masks: string[];
  bits: number;
  names: { name: string; heading: string; meaning: string; unit?: string }[];
  statistics: Record<string, Record<What, (number | null)[]>>[];
  patterns: [string, number, number, boolean][][][];
  also: ([string, number] | null)[][]; // of each layer and head the second pattern beyond chance
  few?: Record<string, FewRows> | undefined; // the patterns that too few rows show, so that no head has a score for them; pages of earlier versions lack it
  patternWords: Record<string, string>;
  tokens: { labels: string[]; longer: Record<string, string> } | null;
  runTokens: { labels: string[]; ids: number[][] } | null; // of each run, where runs read different texts
  image: ImageFacts | null;
  trace: { title: string; stages: { name: string; steps: Step[] }[] } | null;
  tables: TableFacts[];
  highlights: Highlight[];
  opensOn: [number, number] | null; // the layer and head to open first
  served: ([number, number] | null)[] | null; // of each layer with tiles on the server, the lengths of their run
  exact: ExactHead[]; // the heads whose weights the page computes
  history: HistoryFacts | null; // of a training, in place of maps and statistics
  title?: string;
  origin?: Origin | null;
  numbers?: number[][]; // lists of whole numbers, as runs: first number, step, length
}

/** The model of a recording: of each layer the widths of a head of q and k, and of v, and the part of its heads. */
export interface Origin {
  model: string;
  config: string;
  layers: Record<string, [number, number, [number, [number, number] | null, string] | null]>;
}

/** A pattern without a score: how many rows show it, of how many; how many a score needs; the heads with much more weight there than chance gives. */
export interface FewRows {
  rows: number;
  of: number;
  needs: number;
  heads: [number, number][];
}

/** A head to look at first, or how many heads have a pattern (then layer and head are null; "" = no head stands out). */
export interface Highlight {
  pattern: string;
  heads: number;
  of: number;
  unit: string;
  layer: number | null;
  head: number | null;
  name: string;
  score: number | null;
  share: number | null;
  cell: [number, number] | null;
  run?: number | null; // the forward pass of the cell; pages of earlier versions lack it
  weight: number | null;
  texts: [string, string] | null;
  also: [string, number] | null; // the second pattern of the head beyond chance
}

export interface Edge {
  p: number;
  run: number;
  entry: number;
  query: number;
  key: number;
}

export interface Places {
  query: Int32Array;
  key: Int32Array;
  run: Int32Array;
  entry: Int32Array;
}

/** The map of a head, row by row; NaN where no pair is visible. */
export interface HeadMap {
  rows: number;
  columns: number;
  mean: Float32Array;
  max: Float32Array;
  places: Places | null;
  firstShare: Float32Array;
}

export interface Head {
  map: HeadMap | null;
  received: Float32Array;
  entropy: Float32Array;
  edges: Edge[];
  top: { each: number; p: Float32Array; keys: Uint32Array } | null;
}

export const NONE = 0xffffffff;

export const data = JSON.parse(document.getElementById("data")!.textContent!) as Data;
data.layers.forEach((layer, index) => (layer.index = index));
const content = document.getElementById("blocks")!.textContent!;

export function bytes(base64: string): Uint8Array<ArrayBuffer> {
  const text = atob(base64);
  const found = new Uint8Array(text.length);
  for (let n = 0; n < text.length; n++) found[n] = text.charCodeAt(n);
  return found;
}

async function inflated(packed: Uint8Array<ArrayBuffer>): Promise<ArrayBuffer> {
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Response(stream).arrayBuffer();
}

/** The blocks of a page, and what reading them needs. */
export class Blocks {
  private readonly places = new Map<string, Int32Array>();
  constructor(
    readonly content: string,
    readonly bits: number,
    private readonly masks: string[],
  ) {}

  /** The places of the bins with a visible pair. */
  visible(mask: number, cells: number): Int32Array {
    const key = `${mask}/${cells}`;
    let found = this.places.get(key);
    if (!found) {
      const bits = bytes(this.masks[mask]);
      const places: number[] = [];
      for (let n = 0; n < cells; n++) if ((bits[n >> 3] >> (7 - (n & 7))) & 1) places.push(n);
      found = Int32Array.from(places);
      this.places.set(key, found);
    }
    return found;
  }

  /** Four characters of base64 hold three bytes, and every block begins at a multiple of three. */
  async at([start, length]: [number, number]): Promise<ArrayBuffer> {
    return inflated(bytes(this.content.slice((start / 3) * 4, (start / 3) * 4 + Math.ceil(length / 3) * 4)).subarray(0, length));
  }
}

const own = new Blocks(content, data.bits, data.masks);

/** A block, read from its beginning to its end. */
class Reader {
  private at = 0;
  constructor(private readonly buffer: ArrayBuffer) {}

  floats(count: number): Float32Array {
    const found = new Float32Array(this.buffer.slice(this.at, this.at + 4 * count));
    this.at += 4 * count;
    return found;
  }

  words(count: number): Uint32Array {
    const found = new Uint32Array(this.buffer.slice(this.at, this.at + 4 * count));
    this.at += 4 * count;
    return found;
  }

  planes(count: number, width: number): Uint32Array {
    const found = new Uint32Array(count);
    for (let plane = 0; plane < width; plane++) {
      const part = new Uint8Array(this.buffer, this.at, count);
      for (let n = 0; n < count; n++) found[n] += part[n] * 256 ** plane;
      this.at += count;
    }
    return found;
  }
}

/** A head of a page. */
export async function read(layer: Layer, head: number, blocks = own): Promise<Head> {
  const reader = new Reader(await blocks.at(layer.blocks[head]));
  const facts = layer.map;
  const tops = facts ? reader.floats(3) : null;
  const firstShare = facts ? reader.floats(facts.rows) : null;
  const largest = reader.floats(2);
  const profile = (count: number, most: number) =>
    Float32Array.from(reader.planes(count, 2), (code) => (code === 0xffff ? NaN : (most * code) / 0xfffe));
  const received = profile(layer.received, largest[0]);
  const entropy = profile(layer.entropy, largest[1]);
  const p = reader.floats(layer.edges);
  const [run, entry, query, key] = [0, 1, 2, 3].map(() => reader.words(layer.edges));
  const edges = Array.from(p, (each, n) => ({ p: each, run: run[n], entry: entry[n], query: query[n], key: key[n] }));
  const [queries = 0, each = 0] = layer.top;
  const codes = reader.planes(queries * each, 2);
  const top = each ? { each, p: Float32Array.from(codes, (code) => (code / 0xffff) ** 2), keys: reader.planes(queries * each, 4) } : null;
  const map = facts && tops && firstShare ? readMap(reader, facts, head, tops, firstShare, blocks) : null;
  return { map, received, entropy, edges: edges.filter((edge) => edge.run !== NONE), top };
}

/** Codes from their differences from the bin above. */
function undo(codes: Uint32Array, at: Int32Array, columns: number, cells: number): void {
  const full = new Uint8Array(cells);
  for (let n = 0; n < at.length; n++) {
    const above = at[n] >= columns ? full[at[n] - columns] : 0;
    codes[n] = full[at[n]] = (codes[n] + above) & 255;
  }
}

export const FULL = 255; // levels of 8 bits

/** A map whose weights have fewer levels: each is a share of the largest of its row. */
function readCoarse(reader: Reader, at: Int32Array, { rows, columns }: MapFacts, levels: number, most: number): Float32Array {
  const largest = Float32Array.from(reader.planes(rows, 2), (code) => most * (code / 0xffff) ** 2);
  const base = levels + 1;
  const many = Math.floor(Math.log(256.5) / Math.log(base)); // codes in a byte
  const bytes = reader.planes(Math.ceil(at.length / many), 1);
  const found = new Float32Array(rows * columns).fill(NaN);
  for (let n = 0; n < at.length; n++) {
    const code = Math.floor(bytes[Math.floor(n / many)] / base ** (n % many)) % base;
    found[at[n]] = largest[Math.floor(at[n] / columns)] * (code / levels) ** 2;
  }
  return found;
}

function readMap(reader: Reader, facts: MapFacts, head: number, tops: Float32Array, firstShare: Float32Array, blocks: Blocks): HeadMap {
  const { rows, columns } = facts;
  const cells = rows * columns;
  const at = blocks.visible(facts.masks[head], cells);
  const values = (largest: number): Float32Array => {
    const codes = reader.planes(at.length, blocks.bits / 8);
    const found = new Float32Array(cells).fill(NaN);
    const top = 2 ** blocks.bits - 1;
    if (tops[2]) undo(codes, at, columns, cells);
    for (let n = 0; n < at.length; n++) found[at[n]] = largest * (codes[n] / top) ** 2;
    return found;
  };
  const levels = facts.levels?.[head] ?? FULL;
  const mean = levels < FULL ? readCoarse(reader, at, facts, levels, tops[0]) : values(tops[0]);
  if (facts.exact) return { rows, columns, mean, max: mean, places: null, firstShare };
  const max = values(tops[1]);
  const [query, key, run, entry] = facts.widths.map((width) => {
    const found = new Int32Array(cells);
    if (width) {
      const read = reader.planes(at.length, width);
      for (let n = 0; n < at.length; n++) found[at[n]] = read[n];
    }
    return found;
  });
  return { rows, columns, mean, max, places: { query, key, run, entry }, firstShare };
}

const CACHED = 48; // heads that stay decoded: the last ones that were shown

/** The heads of a recording, decoded. */
export class Heads {
  private readonly cached = new Map<string, { later: Promise<Head>; now: Head | null }>();
  constructor(private readonly read: (layer: number, number: number) => Promise<Head>) {}

  private begun(layer: number, number: number) {
    const found = { later: this.read(layer, number), now: null as Head | null };
    void found.later.then((is) => (found.now = is), () => undefined); // who asked reports the error
    return found;
  }

  known(layer: number, number: number): Head | null {
    return this.cached.get(`${layer}.${number}`)?.now ?? null;
  }

  get(layer: number, number: number): Promise<Head> {
    const key = `${layer}.${number}`;
    const found = this.cached.get(key) ?? this.begun(layer, number);
    this.cached.delete(key);
    this.cached.set(key, found);
    if (this.cached.size > CACHED) this.cached.delete(this.cached.keys().next().value!);
    return found.later;
  }

  passing(layer: number, number: number): Promise<Head> {
    return this.cached.get(`${layer}.${number}`)?.later ?? this.read(layer, number);
  }
}

const ownLayers = data.layers;
export const ownHeads = new Heads((layer, number) => read(ownLayers[layer], number));
let heads = ownHeads;
const caches: (() => void)[] = [];

/** Show the heads of another recording from now on, or this page's own ones. */
export function showHeads(of: Heads): void {
  heads = of;
  for (const empty of caches) empty();
}

/** `empty` is called before another recording is shown: it empties what is computed from the data of one. */
export function onOtherData(empty: () => void): void {
  caches.push(empty);
}

/** A head that is cached and decoded; null otherwise. */
export function known(layer: number, number: number): Head | null {
  return heads.known(layer, number);
}

/** A head, decoded; the same object while it is cached. */
export function head(layer: number, number: number): Promise<Head> {
  return heads.get(layer, number);
}

/** A head that is drawn once: it evicts none from the cache. */
export function passing(layer: number, number: number): Promise<Head> {
  return heads.passing(layer, number);
}

/** The strip of a head: codes, row by row. */
export async function strip(place: [number, number]): Promise<Uint8Array> {
  return new Uint8Array(await own.at(place));
}

export function pixels(): Uint8Array {
  return bytes(data.image!.rgb);
}

// ---------------------------------------------------------------- positions

/** The first position of a bin, and the first after it. */
export function range(bin: number, bins: number, length: number | null): [number, number] {
  if (length === null) return [bin, bin + 1];
  if (length <= bins) return [bin, bin + 1];
  return [Math.floor((bin * length) / bins), Math.floor(((bin + 1) * length) / bins)];
}

/** The bin of a position. */
export function binOf(position: number, bins: number, length: number | null): number {
  return Math.min(bins - 1, length === null ? position : Math.ceil(((position + 1) * bins) / length) - 1);
}

/** The token at a position as the page shows it; null where it is not known. */
export function token(position: number, long = false, layer?: Layer): string | null {
  if (data.image) return patchName(position, long);
  const tokens = layer?.other ? layer.other.tokens : data.tokens;
  if (!tokens || position >= tokens.labels.length || position < 0) return null;
  return (long ? tokens.longer[position] : undefined) ?? tokens.labels[position];
}

/** "r2 c5", or in full; the keys before the patches are CLS and registers. */
function patchName(position: number, long: boolean): string {
  const { special, grid } = data.image!;
  if (position < special) return position === 0 ? names.cls : names.register(position);
  const [row, column] = [Math.floor((position - special) / grid[1]), (position - special) % grid[1]];
  return long ? names.patch(row, column) : names.patchShort(row, column);
}

/** Whether positions of this layer have names: tokens, or patches of the image. */
export function hasTokens(layer: Layer): boolean {
  return hasPatches(layer) || hasTexts(layer);
}

export function hasPatches(layer: Layer): boolean {
  const { image } = data;
  return image !== null && layer.lengths !== null && layer.lengths[1] === image.special + image.grid[0] * image.grid[1];
}

export function hasTexts(layer: Layer): boolean {
  const tokens = layer.other ? layer.other.tokens : data.tokens;
  return data.image === null && layer.kind === "self" && tokens !== null && layer.lengths !== null && layer.lengths[1] === tokens.labels.length;
}

/** The position of a query in the text: queries are the last positions, unless the mask places them elsewhere. */
export function queryAt(layer: Layer, query: number): number {
  return layer.lengths && layer.kind === "self" ? query + (layer.strips?.offset ?? layer.lengths[1] - layer.lengths[0]) : query;
}

/** Whether the weights of a layer are known one by one, or at least the largest ones of each query, and its tokens too. */
export function readable(layer: Layer): boolean {
  return hasTexts(layer) && layer.runs === 1 && layer.of === layer.lengths![0] && (!!layer.map?.exact || layer.top.length > 0);
}

export const HAS_SEGMENTS = data.layers.some((layer) => layer.segments !== null);

export const HAS_READING = data.layers.some(readable);
