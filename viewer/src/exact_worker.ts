// Pieces of the weights of a head from its q, k, lse and mask. `work` runs in a worker that is made from its own text: it may
// name nothing outside of itself.

export interface Matrix {
  kind: "float16" | "bfloat16" | "float32" | "int16" | "int8";
  at: [number, number];
}

/** A head whose weights the page computes; the layout is that of src/headscope/report/_viewer/exact_heads.py. */
export interface ExactHead {
  layer: number;
  head: number;
  window?: number | null; // that q and k are of, where the model read a text in windows
  lengths: [number, number];
  depth: number;
  scale: number;
  softcap: number | null;
  bits: number;
  error: number;
  q: Matrix;
  k: Matrix;
  lse: [number, number];
  spans: { at: [number, number]; rows: number; n: number } | null;
  rest: { at: [number, number]; rows: number; columns: number } | null;
  bias: { at: [number, number]; rows: number; columns: number; relative: boolean } | null;
}

/** How a weight comes about. */
export interface Reason {
  q: Float64Array;
  k: Float64Array;
  products: Float64Array; // q · k by dimension
  dot: number;
  bias: number | null;
  masked: boolean;
  logit: number;
  lse: number;
  p: number;
  rival: Rival | null;
}

/** The other key with the largest weight of the same query, and what decides between the two. */
export interface Rival {
  key: number;
  k: Float64Array;
  p: number;
  products: Float64Array; // q · (k − its k) by dimension
}

/** Of each part the base64, and the bytes that it holds; null where a head has none. */
export type Blocks = Record<"q" | "k" | "lse" | "spans" | "rest" | "bias", [string, number] | null>;

/** Which of the heads that the worker holds. */
export type Which = Pick<ExactHead, "layer" | "head" | "window">;

export type Request =
  | { id: number; what: "open"; head: ExactHead; blocks: Blocks }
  | ({ id: number; what: "close" } & Which)
  | ({ id: number; what: "tile"; queries: [number, number]; keys: [number, number]; size: number } & Which)
  | ({ id: number; what: "reason"; query: number; key: number } & Which);

export type Answer = { id: number; tile?: { mean: Float32Array; max: Float32Array }; reason?: Reason; error?: string };

interface Scope {
  onmessage: ((event: MessageEvent<Request>) => void) | null;
  postMessage(answer: Answer, transfer: Transferable[]): void;
}

export function work(scope: Scope): void {
  interface Opened {
    about: ExactHead;
    q: Float32Array;
    k: Float32Array;
    lse: Float32Array;
    spans: Int32Array | null; // [n, 2, rows]
    rest: Uint8Array | null;
    bias: Float32Array | null;
  }
  const opened = new Map<string, Opened>();
  const nameOf = ({ layer, head, window }: Which) => `${layer}.${head}.${window ?? ""}`;

  const bytes = async ([base64, length]: [string, number]): Promise<Uint8Array<ArrayBuffer>> => {
    const text = atob(base64);
    const packed = new Uint8Array(length);
    for (let n = 0; n < length; n++) packed[n] = text.charCodeAt(n);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  };

  /** The value of a float16 by its bits. */
  const half = (code: number): number => {
    const [exponent, fraction] = [(code >> 10) & 31, code & 1023];
    const size = exponent === 31 ? (fraction ? NaN : Infinity) : exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction;
    return code & 0x8000 ? -size : size;
  };

  const matrix = (kind: Matrix["kind"], block: Uint8Array<ArrayBuffer>, rows: number, depth: number): Float32Array => {
    const count = rows * depth;
    const found = new Float32Array(count);
    const scaled = kind === "int16" || kind === "int8";
    const scales = scaled ? new Float32Array(block.buffer.slice(0, 4 * rows)) : null;
    const start = scaled ? 4 * rows : 0;
    const plane = (n: number) => block.subarray(start + n * count, start + (n + 1) * count);
    if (kind === "int8") {
      const codes = plane(0);
      for (let n = 0; n < count; n++) found[n] = ((codes[n] << 24) >> 24) * scales![(n / depth) | 0];
      return found;
    }
    const [low, high] = [plane(0), plane(1)];
    if (kind === "int16") {
      for (let n = 0; n < count; n++) found[n] = (((low[n] | (high[n] << 8)) << 16) >> 16) * scales![(n / depth) | 0];
    } else if (kind === "float16") {
      const values = new Float32Array(65536).map((_, code) => half(code));
      for (let n = 0; n < count; n++) found[n] = values[low[n] | (high[n] << 8)];
    } else if (kind === "bfloat16") {
      const bits = new Uint32Array(found.buffer);
      for (let n = 0; n < count; n++) bits[n] = (low[n] << 16) | (high[n] << 24);
    } else {
      const [third, fourth] = [plane(2), plane(3)];
      const bits = new Uint32Array(found.buffer);
      for (let n = 0; n < count; n++) bits[n] = low[n] | (high[n] << 8) | (third[n] << 16) | (fourth[n] << 24);
    }
    return found;
  };

  const open = async (about: ExactHead, blocks: Blocks): Promise<void> => {
    const [queries, keys] = about.lengths;
    const there = async (name: keyof Blocks) => (blocks[name] ? bytes(blocks[name]!) : null);
    const spans = await there("spans");
    const steps = spans && new Int32Array(spans.buffer);
    if (steps) {
      const { rows } = about.spans!;
      for (let n = 0; n < steps.length; n++) if (n % rows) steps[n] += steps[n - 1];
    }
    const bias = await there("bias");
    opened.set(nameOf(about), {
      about,
      q: matrix(about.q.kind, await bytes(blocks.q!), queries, about.depth),
      k: matrix(about.k.kind, await bytes(blocks.k!), keys, about.depth),
      lse: new Float32Array((await bytes(blocks.lse!)).buffer),
      spans: steps,
      rest: await there("rest"),
      bias: bias && new Float32Array(bias.buffer),
    });
  };

  const biasAt = ({ about, bias }: Opened, query: number, key: number): number => {
    const { rows, columns, relative } = about.bias!;
    if (relative) return bias![key - query + rows - 1];
    return bias![(rows > 1 ? query : 0) * columns + (columns > 1 ? key : 0)];
  };

  /** Which keys of j0 to j1 a query may attend to, as 0 and 1. */
  const visible = ({ about, spans, rest }: Opened, query: number, j0: number, j1: number, into: Uint8Array): void => {
    into.fill(spans ? 0 : 1);
    if (spans) {
      const { rows, n } = about.spans!;
      const row = rows > 1 ? query : 0;
      for (let s = 0; s < n; s++) {
        const [from, to] = [Math.max(j0, spans[2 * s * rows + row]), Math.min(j1, spans[(2 * s + 1) * rows + row])];
        if (to > from) into.fill(1, from - j0, to - j0);
      }
    }
    if (rest) {
      const { rows, columns } = about.rest!;
      const first = (rows > 1 ? query : 0) * columns;
      for (let j = j0; j < j1; j++) {
        const at = first + (columns > 1 ? j : 0);
        if (!((rest[at >> 3] >> (7 - (at & 7))) & 1)) into[j - j0] = 0;
      }
    }
  };

  /** The weights of a query on the keys j0 to j1, NaN where masked; `keys` holds their k as doubles, `row` has room for one of q. */
  const weights = (of: Opened, query: number, j0: number, j1: number, keys: Float64Array, row: Float64Array, may: Uint8Array, into: Float64Array): void => {
    const { depth, scale, softcap } = of.about;
    const lse = of.lse[query];
    into.fill(NaN);
    if (lse !== lse) return;
    visible(of, query, j0, j1, may);
    for (let d = 0; d < depth; d++) row[d] = of.q[query * depth + d];
    const count = j1 - j0;
    for (let j = 0; j < count; j += 4) {
      const last = Math.min(4, count - j);
      if (!(may[j] || (last > 1 && may[j + 1]) || (last > 2 && may[j + 2]) || (last > 3 && may[j + 3]))) continue;
      let [a, b, c, e] = [0, 0, 0, 0]; // four chains of additions: one waits for the last sum
      const at = j * depth;
      for (let d = 0; d < depth; d++) {
        const x = row[d];
        a += x * keys[at + d];
        b += x * keys[at + depth + d];
        c += x * keys[at + 2 * depth + d];
        e += x * keys[at + 3 * depth + d];
      }
      into[j] = a;
      if (last > 1) into[j + 1] = b;
      if (last > 2) into[j + 2] = c;
      if (last > 3) into[j + 3] = e;
    }
    for (let j = 0; j < count; j++) {
      if (!may[j]) {
        into[j] = NaN;
        continue;
      }
      let logit = into[j] * scale;
      if (softcap !== null) logit = softcap * Math.tanh(logit / softcap);
      if (of.bias) logit += biasAt(of, query, j0 + j);
      into[j] = logit === -Infinity ? NaN : Math.exp(logit - lse); // a bias of -inf masks
    }
  };

  /** Mean and max in at most size × size cells, with the bins of the server's tiles. */
  const tile = (of: Opened, [i0, i1]: [number, number], [j0, j1]: [number, number], size: number) => {
    const { depth } = of.about;
    const [high, wide] = [i1 - i0, j1 - j0];
    const [rows, columns] = [Math.min(size, high), Math.min(size, wide)];
    const mean = new Float32Array(rows * columns).fill(NaN);
    const max = new Float32Array(rows * columns).fill(NaN);
    const keys = new Float64Array((wide + 3) * depth); // three rows of zeros: four keys are computed at once
    for (let n = 0; n < wide * depth; n++) keys[n] = of.k[j0 * depth + n];
    const bin = Int32Array.from({ length: wide }, (_, j) => Math.floor(((j + 1) * columns - 1) / wide));
    const [row, may, p] = [new Float64Array(depth), new Uint8Array(wide), new Float64Array(wide)];
    const [sums, counts, tops] = [new Float64Array(columns), new Int32Array(columns), new Float64Array(columns)];
    for (let r = 0; r < rows; r++) {
      sums.fill(0);
      counts.fill(0);
      tops.fill(-1);
      const to = i0 + Math.floor(((r + 1) * high) / rows);
      for (let query = i0 + Math.floor((r * high) / rows); query < to; query++) {
        weights(of, query, j0, j1, keys, row, may, p);
        for (let j = 0; j < wide; j++) {
          const value = p[j];
          if (value !== value) continue;
          const n = bin[j];
          sums[n] += value;
          counts[n]++;
          if (value > tops[n]) tops[n] = value;
        }
      }
      for (let n = 0; n < columns; n++) {
        if (!counts[n]) continue;
        mean[r * columns + n] = sums[n] / counts[n];
        max[r * columns + n] = tops[n];
      }
    }
    return { mean, max };
  };

  const reason = (of: Opened, query: number, key: number): Reason => {
    const { depth, scale, softcap } = of.about;
    const q = Float64Array.from(of.q.subarray(query * depth, (query + 1) * depth));
    const k = Float64Array.from(of.k.subarray(key * depth, (key + 1) * depth));
    const products = q.map((value, d) => value * k[d]);
    const dot = products.reduce((sum, value) => sum + value, 0);
    const may = new Uint8Array(1);
    visible(of, query, key, key + 1, may);
    const bias = of.bias ? biasAt(of, query, key) : null;
    const scaled = dot * scale;
    const logit = (softcap === null ? scaled : softcap * Math.tanh(scaled / softcap)) + (bias ?? 0);
    const masked = !may[0] || logit === -Infinity;
    const lse = of.lse[query];
    return { q, k, products, dot, bias, masked, logit, lse, p: masked ? 0 : Math.exp(logit - lse), rival: masked ? null : rival(of, query, key, q, k) };
  };

  const rival = (of: Opened, query: number, key: number, q: Float64Array, k: Float64Array): Rival | null => {
    const { depth, scale, softcap, lengths } = of.about;
    const may = new Uint8Array(lengths[1]);
    visible(of, query, 0, lengths[1], may);
    let [best, most] = [-1, -Infinity];
    for (let j = 0; j < lengths[1]; j++) {
      if (!may[j] || j === key) continue;
      let dot = 0;
      for (let d = 0; d < depth; d++) dot += q[d] * of.k[j * depth + d];
      const logit = (softcap === null ? dot * scale : softcap * Math.tanh((dot * scale) / softcap)) + (of.bias ? biasAt(of, query, j) : 0);
      if (logit > most) [best, most] = [j, logit];
    }
    if (best < 0) return null;
    const other = Float64Array.from(of.k.subarray(best * depth, (best + 1) * depth));
    return { key: best, k: other, p: Math.exp(most - of.lse[query]), products: q.map((value, d) => value * (k[d] - other[d])) };
  };

  const answer = async (request: Request): Promise<void> => {
    const { id } = request;
    try {
      if (request.what === "open") {
        await open(request.head, request.blocks);
        return scope.postMessage({ id }, []);
      }
      const key = nameOf(request);
      if (request.what === "close") return void opened.delete(key);
      const of = opened.get(key)!;
      if (request.what === "reason") return scope.postMessage({ id, reason: reason(of, request.query, request.key) }, []);
      const found = tile(of, request.queries, request.keys, request.size);
      scope.postMessage({ id, tile: found }, [found.mean.buffer, found.max.buffer]);
    } catch (error) {
      scope.postMessage({ id, error: String(error) }, []);
    }
  };

  let last: Promise<void> = Promise.resolve(); // one after the other, as they came
  scope.onmessage = ({ data }) => void (last = last.then(() => answer(data)));
}
