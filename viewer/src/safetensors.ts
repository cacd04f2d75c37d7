// A safetensors file, read in the page: its header, and its tensors when they are needed. The checks are those of
// src/headscope/stats/_tensor_reader.py and _checksums.py.

import { dropped as texts } from "./texts";

/** A file that cannot be read; the message is one sentence for the reader. */
export class Unreadable extends Error {}

const LONGEST_HEADER = 100_000_000; // bytes, by safetensors
export const MOST_BYTES = 2 ** 29; // of the tensors that the page holds at a time
const CHUNK = 2 ** 22; // bytes that are read at a time

const SIZES: Record<string, number> = { BOOL: 1, U8: 1, I8: 1, I16: 2, I32: 4, I64: 8, F16: 2, BF16: 2, F32: 4, F64: 8 };

interface Entry {
  dtype: string;
  shape: number[];
  start: number;
  stop: number;
}

export interface Tensor {
  dtype: string;
  shape: number[];
  values: Float64Array | Float32Array | Int32Array | Int16Array | Uint8Array; // 64 bits of whole numbers as float64
}

function damaged(name: string, what: string): Unreadable {
  return new Unreadable(texts.damaged(name, what));
}

export class Tensors {
  private readonly held = new Map<string, ArrayBuffer>();
  private checksums: Map<string, number> | null = null;

  private constructor(
    readonly file: File,
    private readonly begin: number,
    readonly metadata: Record<string, string>,
    readonly entries: Map<string, Entry>,
  ) {}

  /** The header of a file. */
  static async open(file: File): Promise<Tensors> {
    const foreign = new Unreadable(texts.foreign(file.name));
    if (file.size < 8) throw foreign;
    const length = Number(new DataView(await file.slice(0, 8).arrayBuffer()).getBigUint64(0, true));
    if (length > LONGEST_HEADER) throw foreign;
    const head = await file.slice(8, 8 + length).arrayBuffer();
    const text = new TextDecoder().decode(head);
    if (head.byteLength < length) throw text.includes('"headscope.stats"') ? new Unreadable(texts.truncated(file.name)) : foreign;
    let header: Record<string, { dtype: string; shape: number[]; data_offsets: [number, number] }>;
    try {
      header = JSON.parse(text) as typeof header;
    } catch {
      throw foreign;
    }
    if (typeof header !== "object" || header === null || Array.isArray(header)) throw foreign;
    const { __metadata__: metadata = {}, ...rest } = header as Record<string, unknown>;
    if (typeof metadata !== "object" || metadata === null || !Object.values(metadata).every((each) => typeof each === "string")) throw foreign;
    if (!("headscope.stats" in metadata)) throw foreign;
    const entries = new Map<string, Entry>();
    for (const [name, entry] of Object.entries(rest as typeof header)) {
      const { dtype, shape, data_offsets: offsets } = entry ?? {};
      const numbers = Array.isArray(shape) && Array.isArray(offsets) && offsets.length === 2 ? [...shape, ...offsets] : [-1];
      if (typeof dtype !== "string" || !numbers.every((n) => Number.isSafeInteger(n) && n >= 0)) throw damaged(file.name, name);
      const size = SIZES[dtype];
      if (size && shape.reduce((a, b) => a * b, size) !== offsets[1] - offsets[0]) throw damaged(file.name, name);
      entries.set(name, { dtype, shape, start: offsets[0], stop: offsets[1] });
    }
    let end = 0;
    for (const { start, stop } of [...entries.values()].sort((a, b) => a.start - b.start || a.stop - b.stop)) {
      if (start !== end || stop < start) throw damaged(file.name, texts.overlap);
      end = stop;
    }
    const size = file.size - 8 - length;
    if (size < end) throw new Unreadable(texts.truncated(file.name));
    if (size > end) throw damaged(file.name, texts.overlap);
    return new Tensors(file, 8 + length, metadata as Record<string, string>, entries);
  }

  /** An entry of the header as JSON; null if there is none. */
  entry(name: string): Record<string, unknown> | null {
    if (!(name in this.metadata)) return null;
    try {
      const found: unknown = JSON.parse(this.metadata[name]);
      if (typeof found === "object" && found !== null && !Array.isArray(found)) return found as Record<string, unknown>;
    } catch {
      // reported below
    }
    throw damaged(this.file.name, name);
  }

  /** Check the header against its checksum, and let each tensor be checked when it is read; older files have no checksums. */
  check(states: boolean): void {
    const entry = this.entry("headscope.checksums");
    const names = [...this.entries.keys()].sort(byCodePoint);
    if (!entry && !states) return;
    const sums = entry?.tensors;
    if (!Array.isArray(sums) || sums.length !== names.length) throw damaged(this.file.name, texts.header);
    const ours = Object.entries(this.metadata).filter(([name]) => name.startsWith("headscope.") && name !== "headscope.checksums");
    ours.sort(([a], [b]) => byCodePoint(a, b));
    const tensors = names.map((name, n) => [name, this.entries.get(name)!.dtype, this.entries.get(name)!.shape, sums[n]]);
    if (crc32(new TextEncoder().encode(asPython([ours, tensors]))) !== entry!.description) throw damaged(this.file.name, texts.header);
    this.checksums = new Map(names.map((name, n) => [name, sums[n] as number]));
  }

  /** Read these tensors together; they stay in memory. */
  async hold(names: string[]): Promise<void> {
    const entries = names.map((name) => [name, this.entries.get(name)!] as const).sort((a, b) => a[1].start - b[1].start);
    if (entries.reduce((sum, [, { start, stop }]) => sum + stop - start, 0) > MOST_BYTES) throw new Unreadable(texts.tooLarge(this.file.name, MOST_BYTES / 2 ** 20));
    for (let n = 0; n < entries.length; ) {
      const { start } = entries[n][1];
      let m = n + 1;
      while (m < entries.length && entries[m][1].start === entries[m - 1][1].stop && entries[m][1].stop - start <= CHUNK) m++;
      const piece = await this.bytes(start, entries[m - 1][1].stop);
      for (const [name, entry] of entries.slice(n, m)) {
        const content = piece.slice(entry.start - start, entry.stop - start);
        this.verify(name, crc32(new Uint8Array(content)));
        this.held.set(name, content);
      }
      n = m;
    }
  }

  /** Forget tensors that were held. */
  release(names: string[]): void {
    for (const name of names) this.held.delete(name);
  }

  has(name: string): boolean {
    return this.entries.has(name);
  }

  /** The shape of a tensor; it must exist. */
  shape(name: string): number[] {
    const entry = this.entries.get(name);
    if (!entry) throw damaged(this.file.name, texts.lacks(name));
    return entry.shape;
  }

  /** A tensor that is held. */
  get(name: string, shape: number[], ...kinds: string[]): Tensor["values"] {
    const entry = this.entries.get(name);
    const content = this.held.get(name);
    if (!entry || !content) throw damaged(this.file.name, texts.lacks(name));
    if (String(entry.shape) !== String(shape) || !kinds.includes(entry.dtype)) throw damaged(this.file.name, name);
    return valuesOf(entry.dtype, content);
  }

  private verify(name: string, checksum: number): void {
    if (this.checksums && this.checksums.get(name) !== checksum) throw damaged(this.file.name, name);
  }

  private async bytes(start: number, stop: number): Promise<ArrayBuffer> {
    let content: ArrayBuffer;
    try {
      content = await this.file.slice(this.begin + start, this.begin + stop).arrayBuffer();
    } catch {
      throw new Unreadable(texts.changed(this.file.name)); // the browser refuses a file that was written since it was chosen
    }
    if (content.byteLength !== stop - start) throw new Unreadable(texts.changed(this.file.name));
    return content;
  }
}

/** Numbers as JavaScript computes with them. */
function valuesOf(dtype: string, content: ArrayBuffer): Tensor["values"] {
  switch (dtype) {
    case "F64": return new Float64Array(content);
    case "F32": return new Float32Array(content);
    case "I64": return Float64Array.from(new BigInt64Array(content), Number);
    case "I32": return new Int32Array(content);
    case "I16": return new Int16Array(content);
    case "BF16": {
      const found = new Uint32Array(new Uint16Array(content));
      for (let n = 0; n < found.length; n++) found[n] <<= 16;
      return new Float32Array(found.buffer);
    }
    case "F16": return Float32Array.from(new Uint16Array(content), half);
    default: return new Uint8Array(content); // U8, BOOL
  }
}

function half(code: number): number {
  const [sign, exponent, rest] = [code >> 15 ? -1 : 1, (code >> 10) & 31, code & 1023];
  if (exponent === 31) return rest ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + rest / 1024) : (2 ** -14 * rest) / 1024);
}

const TABLES = Array.from({ length: 8 }, () => new Int32Array(256)); // eight bytes at a time
for (let n = 0; n < 256; n++) {
  let code = n;
  for (let bit = 0; bit < 8; bit++) code = code & 1 ? (code >>> 1) ^ 0xedb88320 : code >>> 1;
  TABLES[0][n] = code;
}
for (let n = 0; n < 256; n++) for (let t = 1; t < 8; t++) TABLES[t][n] = (TABLES[t - 1][n] >>> 8) ^ TABLES[0][TABLES[t - 1][n] & 255];

export function crc32(content: Uint8Array): number {
  const [t0, t1, t2, t3, t4, t5, t6, t7] = TABLES;
  let code = -1;
  let n = 0;
  for (; n + 8 <= content.length; n += 8) {
    const low = code ^ (content[n] | (content[n + 1] << 8) | (content[n + 2] << 16) | (content[n + 3] << 24));
    code = t7[low & 255] ^ t6[(low >>> 8) & 255] ^ t5[(low >>> 16) & 255] ^ t4[low >>> 24] ^ t3[content[n + 4]] ^ t2[content[n + 5]] ^ t1[content[n + 6]] ^ t0[content[n + 7]];
  }
  for (; n < content.length; n++) code = t0[(code ^ content[n]) & 255] ^ (code >>> 8);
  return ~code >>> 0;
}

/** The order of Python, which compares code points and not units of UTF-16. */
function byCodePoint(a: string, b: string): number {
  const [x, y] = [[...a], [...b]];
  for (let n = 0; n < Math.min(x.length, y.length); n++) if (x[n] !== y[n]) return x[n].codePointAt(0)! - y[n].codePointAt(0)!;
  return x.length - y.length;
}

/** JSON as Python writes it: a blank after each comma, and ASCII only. */
function asPython(value: unknown): string {
  if (Array.isArray(value)) return `[${value.map(asPython).join(", ")}]`;
  return JSON.stringify(value).replace(/[\u007f-\uffff]/g, (letter) => `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`);
}
