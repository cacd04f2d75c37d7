// A recording of headscope, read from its file in the page. docs/concepts/recordings.md describes the tensors; what is read is what
// src/headscope/stats/_statistics_file.py and _stored_map.py read.

import { data, type Data, type Head, type HeadMap, type Layer, type Origin, type What } from "./data";
import { DerivedMaps } from "./derived_map";
import { cached, type Means, type Side, type Sums } from "./side";
import { MOST_BYTES, Tensors, Unreadable } from "./safetensors";
import { dropped as texts } from "./texts";
import { labelled } from "./visible";

const NEWEST = 2; // format of the statistics
const FIGURES = ["F64", "F32"];
const WHOLES = ["U8", "I16", "I32", "I64"];
const MOST_CELLS = 8; // bins of a map for each of its bytes
const MOST_NUMBERS = 2 ** 26; // counts of a map that are held at a time

type Json = Record<string, unknown>;

/** The maps of a layer: where each bin is, and what it holds. */
interface Bins {
  rows: number;
  columns: number;
  exact: boolean;
  of: (head: number) => Promise<{ mean: Float64Array; max: Float64Array; sum: Float64Array }>; // of the bins that cover a query and a key
}

/** Seven digits, as pages hold statistics: equal recordings are then equal. */
function rounded(value: number): number | null {
  return Number.isFinite(value) ? Number(value.toPrecision(7)) : null;
}

class RecordingFile {
  readonly layers: Layer[] = [];
  readonly statistics: Data["statistics"] = [];
  private readonly bins: (Bins | null)[] = [];
  private readonly received: ({ sum: Float64Array | Float32Array; eligible: Float64Array | Float32Array; keys: number } | null)[] = [];
  private readonly parts: (((head: number) => Means) | null)[] = [];

  constructor(
    private readonly tensors: Tensors,
    private readonly kinds: Json,
    readonly tokens: Data["tokens"],
  ) {}

  private fail(what: string): never {
    throw new Unreadable(texts.damaged(this.tensors.file.name, what));
  }

  private whole(entry: Json, name: string, least = 0, most = Number.MAX_SAFE_INTEGER): number {
    const value = entry[name];
    if (!Number.isSafeInteger(value) || (value as number) < least || (value as number) > most) this.fail(name);
    return value as number;
  }

  private list(entry: Json, name: string): string[] {
    const value = entry[name];
    if (!Array.isArray(value) || !value.every((each) => typeof each === "string")) this.fail(name);
    return value as string[];
  }

  private lengths(entry: Json): [number, number] | null {
    const value = entry.lengths ?? null;
    if (value === null) return null;
    if (!Array.isArray(value) || value.length !== 2 || !value.every((n) => Number.isSafeInteger(n) && n >= 0)) this.fail("lengths");
    return value as [number, number];
  }

  add(entry: Json): void {
    const index = this.layers.length;
    const [heads, name] = [this.whole(entry, "heads", 1, 2 ** 20), entry.name];
    if (typeof name !== "string" || this.layers.some((layer) => layer.key === name)) this.fail("layers");
    const [of, lengths] = [this.whole(entry, "of"), this.lengths(entry)];
    const shown = labelled(name, 200, false);
    const get = (what: string, shape: number[], ...kinds: string[]) => this.tensors.get(`${index}/${what}`, shape, ...kinds);
    const layer: Layer = {
      index, name: shown, key: name, short: labelled(name, 60, false), kind: this.kinds[name] === "cross" ? "cross" : "self", heads, lengths,
      runs: this.whole(entry, "runs"), lookedAt: this.whole(entry, "looked_at", 0, of), of,
      rows: [...get("rows", [heads], "I64")], broken: [...get("broken", [heads], "I64")],
      blocks: [], received: 0, receivedOf: 0, entropy: 0, entropyOf: 0, edges: 0, top: [], map: null, strips: null, segments: null,
      first: (entry.first ?? null) === null ? null : this.whole(entry, "first", 1), bins: null,
      other: { tokens: this.tokens, bits: 16 },
    };
    this.layers.push(layer);
    this.statistics.push(Object.fromEntries(this.list(entry, "moments").map((quantity) => [quantity, this.moments(get, quantity, heads)])));
    if (entry.received === true) {
      const [, keys] = this.tensors.shape(`${index}/received`);
      const [sum, eligible] = ["received", "eligible"].map((what, n) => get(what, [heads, keys], ...(n ? ["I64", ...FIGURES] : FIGURES)) as Float64Array);
      this.received.push({ sum, eligible, keys });
      layer.received = layer.receivedOf = keys;
    } else this.received.push(null);
    this.parts.push(this.segments(entry, get, heads));
    const bins = this.map(entry, layer, get);
    this.bins.push(bins);
    if (bins) layer.map = { rows: bins.rows, columns: bins.columns, exact: bins.exact, ranges: lengths !== null, masks: [], levels: null, widths: [0, 0, 0, 0] };
  }

  private moments(get: Get, quantity: string, heads: number): Record<What, (number | null)[]> {
    const count = get(`moments/${quantity}/count`, [heads], "I64");
    const [mean, squares, min, max] = ["mean", "M2", "min", "max"].map((what) => get(`moments/${quantity}/${what}`, [heads], ...FIGURES));
    const figures = (of: (n: number) => number) => Array.from({ length: heads }, (_, n) => rounded(of(n)));
    return {
      mean: figures((n) => mean[n]), std: figures((n) => Math.sqrt(squares[n] / count[n])),
      min: figures((n) => min[n]), max: figures((n) => max[n]), count: [...count],
    };
  }

  private segments(entry: Json, get: Get, heads: number): ((head: number) => Means) | null {
    if ((entry.segments ?? null) === null) return null;
    const names = this.list(entry, "segments");
    const size = names.length;
    const [sum, count] = [get("segments/sum", [heads, size, size], ...FIGURES), get("segments/count", [heads, size], "I64", ...FIGURES)];
    const first = entry.segment_first === true ? get("segments/first", [heads, size, size], ...FIGURES) : null;
    const holders = names.map((_, n) => n).filter((n) => first?.some((sum, at) => at % size === n && sum > 0));
    return (head) => ({
      holders,
      withoutFirst: first && ((query, key) => {
        const at = (head * size + query) * size + key;
        return Math.max(0, sum[at] - first[at]) / count[head * size + query];
      }),
      names: names.map((name) => labelled(name, 60, false)),
      mean: (query, key) => sum[(head * size + query) * size + key] / count[head * size + query],
      rows: (query) => count[head * size + query],
    });
  }

  private map(entry: Json, layer: Layer, get: Get): Bins | null {
    const cells = entry.cells ?? null;
    if (cells === null) return entry.map === true ? this.oldMap(layer, get) : null;
    if (typeof cells !== "object" || Array.isArray(cells)) this.fail("cells");
    const form = (cells as Json).form;
    const n = (layer.bins = this.whole(cells as Json, "bins", 1, 2 ** 15));
    if (form === "weights") {
      const maps = new DerivedMaps(this.tensors, layer, entry, n);
      return { rows: maps.queries, columns: maps.keys, exact: maps.exact, of: (head) => maps.of(head) };
    }
    if (form !== "codes" && form !== "exact") this.fail("form");
    const { heads } = layer;
    const stored = [...this.tensors.entries].reduce((sum, [name, { start, stop }]) => sum + (name.startsWith(`${layer.index}/map/`) ? stop - start : 0), 0);
    if (heads * n * n > MOST_CELLS * stored) this.fail(`${layer.index}/map`);
    const counts = this.counts(layer, get, n);
    const sizes = counts.map((each) => each.reduce((sum, count) => sum + (count > 0 ? 1 : 0), 0));
    const starts = [0];
    for (const size of sizes) starts.push(starts[starts.length - 1] + size);
    const total = starts[heads];
    const equal = (cells as Json).equal === true;
    const names = form === "codes" ? ["mean", "max"] : ["sum", "max"];
    const [first, most] = names.slice(0, equal ? 1 : 2).map((name) => get(`map/${name}`, [total], ...(form === "codes" ? ["I16"] : FIGURES)));
    const scale = form === "codes" ? get("map/scale", [heads, 2], "F64") : null;
    const layout = standing(n, layer.lengths);
    return {
      ...sizeOf(layout), exact: isExact(layer, n, counts),
      of: async (head) => {
        const decode = scale ? decoder(scale[2 * head], scale[2 * head + 1]) : (value: number) => value;
        let at = starts[head] - 1;
        return cut(layout, n, counts[head], (count) => {
          const value = decode(first[++at]);
          const mean = scale ? value : value / count;
          return [mean, most ? decode(most[at]) : value, scale ? value * count : value];
        });
      },
    };
  }

  /** The map of format 1: four tensors with every bin. */
  private oldMap(layer: Layer, get: Get): Bins {
    const n = this.tensors.shape(`${layer.index}/map/sum`)[1] ?? 0;
    layer.bins = n;
    const shape = [layer.heads, n, n];
    const [sum, max, count] = [get("map/sum", shape, ...FIGURES), get("map/max", shape, ...FIGURES), get("map/count", shape, "I64")];
    const counts = Array.from({ length: layer.heads }, (_, head) => Float64Array.from(count.subarray(head * n * n, (head + 1) * n * n)));
    const layout = standing(n, layer.lengths);
    return {
      ...sizeOf(layout), exact: isExact(layer, n, counts),
      of: async (head) => cut(layout, n, counts[head], (pairs, at) => [sum[head * n * n + at] / pairs, max[head * n * n + at], sum[head * n * n + at]]),
    };
  }

  /** The numbers of pairs in the bins of each head; heads of one pattern share them. */
  private counts(layer: Layer, get: Get, n: number): Float64Array[] {
    const { heads, index } = layer;
    const which = this.tensors.has(`${index}/map/pattern`) ? [...get("map/pattern", [heads], ...WHOLES)] : Array<number>(heads).fill(0);
    if (!which.every((each) => each >= 0 && each < heads)) this.fail(`${index}/map/pattern`);
    const patterns = Math.max(...which) + 1;
    const size = patterns * n * n;
    if (size > MOST_NUMBERS) throw new Unreadable(texts.tooLarge(this.tensors.file.name, MOST_BYTES / 2 ** 20));
    const found = new Float64Array(size);
    if (this.tensors.has(`${index}/map/length`)) {
      const runs = this.tensors.shape(`${index}/map/length`);
      const [numbers, lengths] = [get("map/count", runs, ...WHOLES), get("map/length", runs, ...WHOLES)];
      let at = 0;
      for (let run = 0; run < numbers.length; run++) {
        if (!(lengths[run] > 0) || at + lengths[run] > size) this.fail(`${index}/map/length`);
        found.fill(numbers[run], at, (at += lengths[run]));
      }
      if (at !== size) this.fail(`${index}/map/length`);
    } else found.set(get("map/count", [patterns, n, n], ...WHOLES));
    if (found.some((count) => count < 0)) this.fail(`${index}/map/count`);
    return which.map((pattern) => found.subarray(pattern * n * n, (pattern + 1) * n * n));
  }

  async head(layer: number, head: number): Promise<Head> {
    const received = this.received[layer];
    const ratio = received ? Float32Array.from({ length: received.keys }, (_, n) => received.sum[head * received.keys + n] / received.eligible[head * received.keys + n]) : new Float32Array(0);
    return { map: await this.headMap(layer, head), received: ratio, entropy: new Float32Array(0), edges: [], top: null };
  }

  private async headMap(layer: number, head: number): Promise<HeadMap | null> {
    const bins = this.bins[layer];
    if (!bins) return null;
    const { rows, columns } = bins;
    const { mean, max, sum } = await bins.of(head);
    const firstShare = Float32Array.from({ length: rows }, (_, r) => {
      let weight = 0;
      for (let n = r * columns; n < (r + 1) * columns; n++) weight += sum[n];
      return weight > 0 ? sum[r * columns] / weight : NaN;
    });
    return { rows, columns, mean: Float32Array.from(mean), max: Float32Array.from(max), places: null, firstShare };
  }

  async sums(layer: number, head: number): Promise<Sums> {
    const [bins, received] = [this.bins[layer], this.received[layer]];
    return {
      map: bins ? (await bins.of(head)).sum : null,
      received: received ? Float64Array.from(received.sum.subarray(head * received.keys, (head + 1) * received.keys)) : null,
    };
  }

  means(layer: number, head: number): Means | null {
    return this.parts[layer]?.(head) ?? null;
  }
}

type Get = (what: string, shape: number[], ...kinds: string[]) => Float64Array | Float32Array | Int32Array | Int16Array | Uint8Array;

/** A weight from its code, which files hold less 32,768. */
function decoder(low: number, high: number): (code: number) => number {
  const extent = low > 0 ? Math.log(high) - Math.log(low) : 0;
  const step = extent > 1e-6 ? extent / 65534 : 0;
  return (code) => {
    const steps = code + 32767;
    return steps < 0 ? 0 : steps === 65534 ? high : low * Math.exp(steps * step);
  };
}

/** Which of n bins cover a query, and which a key; all if their ranges are not known. */
export function standing(n: number, lengths: [number, number] | null): [number[], number[]] {
  const of = (length: number) => {
    const found: number[] = [];
    for (let b = 0; b < n; b++) if (Math.floor(((b + 1) * length) / n) > Math.floor((b * length) / n)) found.push(b);
    return found;
  };
  return [of(lengths?.[0] ?? n), of(lengths?.[1] ?? n)];
}

function sizeOf([rows, columns]: [number[], number[]]): { rows: number; columns: number } {
  return { rows: rows.length, columns: columns.length };
}

/** Whether each bin is one weight of one run and batch entry. */
function isExact({ lengths }: Layer, n: number, counts: Float64Array[]): boolean {
  return lengths !== null && Math.max(...lengths) <= n && ![...new Set(counts)].some((each) => each.some((count) => count > 1));
}

/** The bins that cover a query and a key; `value` gives mean, max and sum of one with visible pairs, in order. */
function cut([rows, columns]: [number[], number[]], n: number, counts: Float64Array, value: (count: number, at: number) => [number, number, number]) {
  const [mean, max, sum] = [NaN, NaN, 0].map((empty) => new Float64Array(rows.length * columns.length).fill(empty));
  const [down, across] = [new Int32Array(n).fill(-1), new Int32Array(n).fill(-1)];
  rows.forEach((row, at) => (down[row] = at));
  columns.forEach((column, at) => (across[column] = at));
  for (let at = 0; at < n * n; at++) {
    if (!(counts[at] > 0)) continue;
    const [x, y, z] = value(counts[at], at);
    const [row, column] = [down[Math.floor(at / n)], across[at % n]];
    if (row < 0 || column < 0) continue;
    const place = row * columns.length + column;
    [mean[place], max[place], sum[place]] = [x, y, z];
  }
  return { mean, max, sum };
}

/** The recording in a file; an error is one sentence. */
export async function readRecording(file: File): Promise<Side> {
  const tensors = await Tensors.open(file);
  const header = tensors.entry("headscope.stats")!;
  const version = header.version;
  if (!Number.isSafeInteger(version) || !Array.isArray(header.layers) || header.layers.length === 0) throw new Unreadable(texts.damaged(file.name, texts.header));
  if ((version as number) > NEWEST) throw new Unreadable(texts.newer(file.name));
  tensors.check("checksums" in header);
  await tensors.hold([...tensors.entries.keys()].filter((name) => !/^\d+\/(qk|kept|weights)\/|\/(histogram|argmax|run|entry|query|key)$|^\d+\/(nulls|received_max)$/.test(name)));
  const recording = tensors.entry("headscope.recording");
  const about = (recording?.about ?? {}) as Json;
  const tokens = Array.isArray(about.texts) && about.texts.every((each) => typeof each === "string") ? tokensOf(about.texts as string[]) : null;
  const read = new RecordingFile(tensors, (about.kinds ?? {}) as Json, tokens);
  for (const entry of header.layers as Json[]) {
    if (typeof entry !== "object" || entry === null) throw new Unreadable(texts.damaged(file.name, texts.header));
    read.add(entry);
  }
  shorten(read.layers);
  const names = [...new Set(read.statistics.flatMap((each) => Object.keys(each)))];
  return {
    title: typeof about.model === "string" ? labelled(about.model, 160, false) : "",
    layers: read.layers, statistics: read.statistics, tokens, runTokens: null, named: null, origin: originOf(tensors),
    names: names.map((name) => data.names.find((each) => each.name === name) ?? { name, heading: labelled(name.replaceAll("_", " "), 60, false), meaning: "" }),
    head: cached((layer, head) => read.head(layer, head)),
    sums: (layer, head) => read.sums(layer, head),
    segments: (layer, head) => read.means(layer, head),
  };
}

/** Layer names without their common beginning and end: `short_layers` in src/headscope/_analysis/answers.py. */
function shorten(layers: Layer[]): void {
  const parts = layers.map((layer) => layer.key!.split("."));
  const most = Math.min(...parts.map((each) => each.length)) - 1;
  const differs = (at: number) => new Set(parts.map((each) => each.at(at))).size > 1;
  let [start, stop] = [0, 0];
  while (start < most && !differs(start)) start++;
  while (stop < most - start && !differs(-1 - stop)) stop++;
  if (layers.length < 2) return;
  layers.forEach((layer, n) => (layer.short = labelled(parts[n].slice(start, parts[n].length - stop).join("."), 60, false)));
}

function tokensOf(texts: string[]): Data["tokens"] {
  const longer: Record<string, string> = {};
  const labels = texts.map((text, n) => {
    const [short, long] = [labelled(text, 24), labelled(text, 200)];
    if (long !== short) longer[n] = long;
    return short;
  });
  return { labels, longer };
}

function originOf(tensors: Tensors): Origin | null {
  const entry = tensors.entry("headscope.origin");
  if (!entry || typeof entry.model !== "string" || !entry.model) return null;
  const layers: Origin["layers"] = {};
  for (const [name, layer] of Object.entries((entry.layers ?? {}) as Record<string, Json>)) {
    const [widths, part] = [layer?.widths, (layer?.part ?? null) as Json | null];
    if (!Array.isArray(widths) || widths.length !== 2) throw new Unreadable(texts.damaged(tensors.file.name, "headscope.origin"));
    layers[name] = [Number(widths[0]), Number(widths[1]), part && [Number(part.of), (part.heads ?? null) as [number, number] | null, String(part.holder)]];
  }
  return { model: labelled(entry.model, 160, false), config: String(entry.config ?? ""), layers };
}
