// The history of a training: the values of every head, step by step. The layout of its blocks is that of
// src/headscope/report/_viewer/from_history.py.

import { data, strip as block } from "./data";

export interface Quantity {
  name: string;
  heading: string;
  meaning: string;
  scale: "linear" | "asinh";
  pivot: number;
  low: number; // of u, which is the value on a linear scale, and asinh(value / pivot) otherwise
  high: number;
  bits: 32 | 8;
  stride: number; // the page holds every so many-th step
  blocks: [number, number][]; // of each layer
}

export interface HistoryFacts {
  steps: number[];
  starts: number[];
  quantities: Quantity[];
  bands: { name: string; block: [number, number] }[];
  alarms: [number, number, number, number, number | null, number | null, number | null, (number | null)?][];
  whats: What[];
  alarmed: boolean; // whether alarms were requested
  limits: Record<string, number | null>; // of quantities
}

export type What = "entropy collapse" | "growing logits" | "rising sink";

/** The quantity that an alarm is about. */
export const ALARMED: Record<What, string> = { "entropy collapse": "normalized_entropy", "growing logits": "max_logit_max", "rising sink": "first" };

export interface Alarm {
  step: number;
  moment: number; // the stored step at or before it
  layer: number;
  head: number;
  what: What;
  value: number;
  limit: number;
  reference: number; // an earlier value that it is compared with
  since: number | null; // the step of that value
}

/** A number for each step. */
export type Curve = Float32Array;

export const history = data.history as HistoryFacts;
export const COUNT = data.history?.steps.length ?? 0;

/** The last stored step at or before a step. */
export function momentOf(step: number): number {
  let [low, high] = [0, COUNT];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (history.steps[middle] <= step) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 1);
}

const number = (value: number | null) => value ?? Infinity; // JSON has no infinity

/** In the order of their steps. */
export const alarms: Alarm[] = (data.history?.alarms ?? []).map(([step, layer, head, what, value, limit, reference, since]) => ({
  step, moment: momentOf(step), layer, head, what: history.whats[what], value: number(value), limit: number(limit), reference: number(reference), since: since ?? null,
}));

/** The first alarm of each head and kind, the most serious kind first. */
export const firstAlarms: Alarm[] = history?.whats.flatMap((what) => {
  const known = new Set<string>();
  return alarms.filter((each) => {
    const key = `${each.layer}.${each.head}`;
    return each.what === what && !known.has(key) && !!known.add(key);
  });
}) ?? [];

/** The place of each layer's first head among all heads, and the number of all. */
export const OFFSETS = data.layers.map((_, at) => data.layers.slice(0, at).reduce((sum, layer) => sum + layer.heads, 0));
export const HEADS = data.layers.reduce((sum, layer) => sum + layer.heads, 0);

export function quantityOf(name: string): Quantity {
  return history.quantities.find((each) => each.name === name) ?? history.quantities[0];
}

/** The place of a value on a scale, 0 to 1; NaN has none. */
export function placeOn(of: Pick<Quantity, "scale" | "pivot" | "low" | "high">, value: number): number {
  if (value === Infinity) return 1;
  if (value === -Infinity) return 0;
  const u = of.scale === "asinh" ? Math.asinh(value / of.pivot) : value;
  return (u - of.low) / (of.high - of.low);
}

// ---------------------------------------------------------------- decoding

const CODES = 252;
const SPECIAL = [-Infinity, Infinity, NaN]; // the codes that follow

/** The value of each code of 8 bits. */
function valuesOfCodes({ scale, pivot, low, high }: Quantity): Float32Array {
  return Float32Array.from({ length: 256 }, (_, code) => {
    if (code > CODES) return SPECIAL[code - CODES - 1];
    const u = low + ((high - low) * code) / CODES;
    return scale === "asinh" ? pivot * Math.sinh(u) : u;
  });
}

/** The values of a layer, head by head, one for each step. */
async function decoded(of: Quantity, layer: number): Promise<Float32Array> {
  const bytes = await block(of.blocks[layer]);
  if (of.bits === 32) return new Float32Array(bytes.buffer);
  const { heads } = data.layers[layer];
  const columns = bytes.length / heads;
  const table = valuesOfCodes(of);
  const found = new Float32Array(heads * COUNT);
  for (let head = 0; head < heads; head++) {
    let code = 0;
    for (let column = 0; column < columns; column++) {
      code = (code + bytes[head * columns + column]) & 255;
      const start = head * COUNT + column * of.stride;
      found.fill(table[code], start, Math.min(start + of.stride, (head + 1) * COUNT));
    }
  }
  return found;
}

/** The values of all heads, the heads of a layer after those of the one before. */
async function whole(of: Quantity): Promise<Float32Array> {
  const found = new Float32Array(HEADS * COUNT);
  const parts = await Promise.all(data.layers.map((_, layer) => decoded(of, layer)));
  parts.forEach((part, layer) => found.set(part, OFFSETS[layer] * COUNT));
  return found;
}

/** Remembers the results of the last calls. */
function remembering<T>(most: number) {
  const known = new Map<string, Promise<T>>();
  return (key: string, compute: () => Promise<T>): Promise<T> => {
    const found = known.get(key) ?? compute();
    known.delete(key);
    known.set(key, found);
    if (known.size > most) known.delete(known.keys().next().value!);
    return found;
  };
}

const wholes = remembering<Float32Array>(2);
const layers = remembering<Float32Array[]>(2);
const bands = remembering<Float32Array>(4);

export function allValues(name: string): Promise<Float32Array> {
  return wholes(name, () => whole(quantityOf(name)));
}

/** All quantities of a layer, in their order. */
export function layerValues(layer: number): Promise<Float32Array[]> {
  return layers(String(layer), () => Promise.all(history.quantities.map((of) => decoded(of, layer))));
}

/** Minimum, 10 %, median, 90 % and maximum over all heads. */
export async function band(place: [number, number]): Promise<Curve[]> {
  const found = await bands(place.join(), async () => new Float32Array((await block(place)).buffer));
  return Array.from({ length: 5 }, (_, n) => found.subarray(n * COUNT, (n + 1) * COUNT));
}

// ---------------------------------------------------------------- the order of heads

export interface Place {
  layer: number;
  head: number;
}

export const RANKS = ["layer", "change", "alarm"] as const;
export type Rank = (typeof RANKS)[number];

export function indexOf({ layer, head }: Place): number {
  return OFFSETS[layer] + head;
}

/** All heads in an order, by numbers among all heads. */
export function ranked(rank: Rank, of: Quantity, values: Float32Array | null): Place[] {
  const places = data.layers.flatMap((layer, at) => Array.from({ length: layer.heads }, (_, head) => ({ layer: at, head })));
  if (rank === "change" && values) {
    const changes = places.map((_, n) => -changeOf(of, values.subarray(n * COUNT, (n + 1) * COUNT)));
    return places.sort((a, b) => changes[indexOf(a)] - changes[indexOf(b)]);
  }
  if (rank === "alarm") {
    const first = new Float64Array(HEADS).fill(Number.MAX_VALUE);
    for (const alarm of alarms) first[indexOf(alarm)] = Math.min(first[indexOf(alarm)], alarm.step);
    return places.sort((a, b) => first[indexOf(a)] - first[indexOf(b)]);
  }
  return places;
}

export const ENTROPY = "normalized_entropy";

/** A rise of the entropy of most heads, with the head that rises most. */
export interface Rise {
  moment: number;
  heads: number;
  place: Place;
  before: number;
  after: number;
}

const LEAST_RISE = 0.1; // of the normalized entropy
const LEAST_HEADS = 0.5; // of all heads
const NEAR = 0.1; // of the rise: so far from its least value the median has not begun to rise
const LAST = 0.2; // of the steps

/** From which step on the normalized entropy of most heads rises, to the last fifth of the steps: the last step at which their median is near
 * its least value. Null where fewer than half of the heads rise. */
export function riseOf(values: Float32Array): Rise | null {
  const last = COUNT - Math.max(1, Math.round(LAST * COUNT)); // where the last fifth begins
  const curves = Array.from({ length: HEADS }, (_, n) => values.subarray(n * COUNT, (n + 1) * COUNT));
  const median = Array.from({ length: COUNT }, (_, at) => middle(curves.map((curve) => curve[at])));
  const end = mean(median.slice(last));
  const least = Math.min(...median.slice(0, last).filter(Number.isFinite));
  if (!(end - least >= LEAST_RISE)) return null;
  let moment = last - 1;
  while (!(median[moment] <= least + NEAR * (end - least))) moment--;
  const near = (curve: ArrayLike<number>) => mean(Array.from(curve).slice(Math.max(0, moment - 1), moment + 2)); // a single step may be noise
  const rises = curves.map((curve) => ({ before: near(curve), after: mean(Array.from(curve).slice(last)) }));
  const heads = rises.filter(({ before, after }) => after - before >= LEAST_RISE).length;
  if (heads < LEAST_HEADS * HEADS) return null;
  const gain = (n: number) => rises[n].after - rises[n].before || 0;
  const most = rises.reduce((best, _, n) => (gain(n) > gain(best) ? n : best), 0);
  const layer = OFFSETS.findLastIndex((offset) => offset <= most);
  return { moment, heads, place: { layer, head: most - OFFSETS[layer] }, ...rises[most] };
}

function mean(values: number[]): number {
  const finite = values.filter(Number.isFinite);
  return finite.reduce((sum, value) => sum + value, 0) / finite.length;
}

function middle(values: number[]): number {
  const sorted = values.filter(Number.isFinite).sort((a, b) => a - b);
  return sorted.length === 0 ? NaN : (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
}

/** From the smallest to the largest value, on the scale of the quantity. */
function changeOf(of: Quantity, curve: Curve): number {
  let [low, high] = [Infinity, -Infinity];
  for (const value of curve) {
    const at = placeOn(of, value);
    if (at < low) low = at;
    if (at > high) high = at;
  }
  return Math.max(0, high - low);
}

// ---------------------------------------------------------------- the address

export interface HistoryState {
  quantity: string;
  moment: number; // which of the stored steps
  rank: Rank;
}

const MANY = 128; // heads, above which not all are in sight: those that changed come first

export const FIRST_HISTORY: HistoryState = { quantity: data.history?.quantities[0].name ?? "", moment: firstAlarms[0]?.moment ?? COUNT - 1, rank: HEADS > MANY ? (alarms.length > 0 ? "alarm" : "change") : "layer" };

export function parseHistory(params: URLSearchParams): HistoryState {
  const step = /^\d+$/.test(params.get("step") ?? "") ? Number(params.get("step")) : null;
  const { quantity, moment, rank } = FIRST_HISTORY;
  return {
    quantity: data.history?.quantities.find(({ name }) => name === params.get("quantity"))?.name ?? quantity,
    moment: data.history && step !== null ? momentOf(step) : moment,
    rank: RANKS.find((name) => name === params.get("rows")) ?? rank,
  };
}

export function addHistory(params: URLSearchParams, { quantity, moment, rank }: HistoryState): void {
  if (!data.history) return;
  if (quantity !== FIRST_HISTORY.quantity) params.set("quantity", quantity);
  if (moment !== FIRST_HISTORY.moment) params.set("step", String(history.steps[moment]));
  if (rank !== FIRST_HISTORY.rank) params.set("rows", rank);
}
