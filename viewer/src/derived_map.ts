// Maps with a bin for each token that a file does not hold, because they follow from its q, k and lse: src/headscope/stats/_derived_map.py.

import type { Layer } from "./data";
import { MOST_BYTES, type Tensors, Unreadable } from "./safetensors";
import { dropped as texts } from "./texts";

type Json = Record<string, unknown>;
type Numbers = ReturnType<Tensors["get"]>;

const FLOATS = ["F64", "F32", "F16", "BF16"];

/** A tensor that broadcasts to [B, H, Q, K]. */
interface Block {
  shape: number[];
  values: Numbers;
}

interface Run {
  batch: number;
  groups: number;
  depth: number;
  scale: number;
  softcap: number | null;
  q: Numbers;
  k: Numbers;
  lse: Numbers;
  counted: Block;
  spans: Block | null;
  rest: Block | null;
  bias: Block | null;
}

/** The runs of the layer that was read last: one layer at a time is in memory. */
let held: { maps: DerivedMaps; names: string[]; runs: Run[] } | null = null;
let reading: Promise<unknown> = Promise.resolve();

export class DerivedMaps {
  readonly queries: number;
  readonly keys: number;
  readonly exact: boolean;
  private readonly runs: { at: string; entry: Json; run: number }[];

  constructor(
    private readonly tensors: Tensors,
    private readonly layer: Layer,
    entry: Json,
    bins: number,
  ) {
    const { lengths } = layer;
    const entries = entry.qk as Json[] | undefined;
    if (!lengths || !Array.isArray(entries) || entries.length !== layer.runs || entries.length === 0 || Math.max(...lengths) > bins || Math.min(...lengths) < 1) {
      throw new Unreadable(texts.damaged(tensors.file.name, `${layer.index}/map`));
    }
    [this.queries, this.keys] = lengths;
    if (this.queries * this.keys > 2 ** 26) throw new Unreadable(texts.tooLarge(tensors.file.name, MOST_BYTES / 2 ** 20));
    this.runs = entries.map((each, n) => ({ at: `${layer.index}/qk/${n}`, entry: each, run: n }));
    this.exact = entries.length === 1 && this.tensors.shape(`${layer.index}/qk/0/q`)[0] === 1;
  }

  async of(head: number) {
    const runs = await (reading = reading.then(() => this.read(), () => this.read())) as Run[];
    const cells = this.queries * this.keys;
    const [sum, count, max] = [new Float64Array(cells), new Uint32Array(cells), new Float64Array(cells).fill(-Infinity)];
    for (const run of runs) for (let b = 0; b < run.batch; b++) this.addWeights(run, b, head, sum, count, max);
    const mean = sum.map((value, n) => value / count[n]);
    for (let n = 0; n < cells; n++) if (!count[n]) max[n] = NaN;
    return { mean, max, sum };
  }

  /** The tensors of this layer, in place of those of another one. */
  private async read(): Promise<Run[]> {
    if (held?.maps === this) return held.runs;
    if (held) held.maps.tensors.release(held.names);
    held = null;
    const names = [...this.tensors.entries.keys()].filter((name) => name.startsWith(`${this.layer.index}/qk/`));
    await this.tensors.hold(names);
    const runs = this.runs.map((each) => this.run(each));
    held = { maps: this, names, runs };
    return runs;
  }

  private run({ at, entry, run }: { at: string; entry: Json; run: number }): Run {
    const { tensors, queries, keys } = this;
    const { heads } = this.layer;
    const [batch, , , depth] = tensors.shape(`${at}/q`);
    const groups = tensors.shape(`${at}/k`)[1];
    const wrong = (what: string) => new Unreadable(texts.damaged(tensors.file.name, `${at}/${what}`));
    if (!groups || heads % groups) throw wrong("k");
    const { scale, softcap = null } = entry;
    if (typeof scale !== "number" || (softcap !== null && typeof softcap !== "number")) throw wrong("scale");
    const full = [batch, heads, queries, keys];
    const block = (name: string, ...kinds: string[]): Block | null => {
      if (!tensors.has(`${at}/${name}`)) return null;
      const shape = tensors.shape(`${at}/${name}`);
      if (shape.length !== 4 || (name !== "spans" && !shape.every((n, axis) => n === 1 || n === full[axis]))) throw wrong(name);
      if (name === "spans" && (![1, batch].includes(shape[0]) || ![1, queries].includes(shape[1]) || shape[3] !== 2)) throw wrong(name);
      return { shape, values: tensors.get(`${at}/${name}`, shape, ...kinds) };
    };
    const name = `${this.layer.index}/map/counted/${run}`;
    const of = tensors.shape(name);
    if (of.length !== 3 || of[0] !== batch || ![1, heads].includes(of[1]) || of[2] !== queries) throw wrong("counted");
    return {
      batch, groups, depth, scale, softcap,
      q: tensors.get(`${at}/q`, [batch, heads, queries, depth], ...FLOATS), k: tensors.get(`${at}/k`, [batch, groups, keys, depth], ...FLOATS),
      lse: tensors.get(`${at}/lse`, [batch, heads, queries], ...FLOATS),
      counted: { shape: of, values: tensors.get(name, of, "BOOL") },
      spans: block("spans", "I64"), rest: block("rest", "BOOL"), bias: block("bias", ...FLOATS),
    };
  }

  /** Add the weights of a batch entry. */
  private addWeights(run: Run, b: number, head: number, sum: Float64Array, count: Uint32Array, max: Float64Array): void {
    const { queries, keys } = this;
    const { heads } = this.layer;
    const { depth, scale, softcap, q, k, lse, counted, spans, rest, bias } = run;
    const fromK = (b * run.groups + Math.floor((head * run.groups) / heads)) * keys * depth;
    const group = Math.min(head, counted.shape[1] - 1);
    for (let i = 0; i < queries; i++) {
      const row = (b * heads + head) * queries + i;
      if (!counted.values[(b * counted.shape[1] + group) * queries + i] || !(Math.abs(lse[row]) < Infinity)) continue;
      const [allowed, added] = [rest && rowOf(rest, b, head, i), bias && rowOf(bias, b, head, i)];
      const within = spans && spansOf(spans, b, i);
      for (let j = 0; j < keys; j++) {
        if (within && !within(j)) continue;
        if (allowed && !allowed(j)) continue;
        const more = added ? added(j) : 0;
        if (more === -Infinity) continue;
        let dot = 0;
        const [x, y] = [row * depth, fromK + j * depth];
        for (let d = 0; d < depth; d++) dot += q[x + d] * k[y + d];
        dot *= scale;
        if (softcap !== null) dot = softcap * Math.tanh(dot / softcap);
        const p = Math.exp(dot + more - lse[row]);
        if (p !== p) continue;
        const n = i * keys + j;
        sum[n] += p;
        count[n]++;
        if (p > max[n]) max[n] = p;
      }
    }
  }
}

/** A row of a tensor that broadcasts to [B, H, Q, K]. */
function rowOf({ shape, values }: Block, b: number, head: number, i: number): (j: number) => number {
  const at = [b, head, i].reduce((sum, n, axis) => sum * shape[axis] + (shape[axis] > 1 ? n : 0), 0) * shape[3];
  return shape[3] > 1 ? (j) => values[at + j] : () => values[at];
}

/** Whether a key is in one of the spans [B or 1, Q or 1, n, 2] of a query. */
function spansOf({ shape, values }: Block, b: number, i: number): (j: number) => boolean {
  const at = ((shape[0] > 1 ? b : 0) * shape[1] + (shape[1] > 1 ? i : 0)) * shape[2] * 2;
  return (j) => {
    for (let n = 0; n < shape[2]; n++) if (j >= values[at + 2 * n] && j < values[at + 2 * n + 1]) return true;
    return false;
  };
}
