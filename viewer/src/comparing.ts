// What moved between two recordings, head by head. The rules, thresholds and sizes are those of src/headscope/comparing.py.

import { type Data, data, type Layer, type Origin } from "./data";
import { say } from "./languages";
import { keyOf, type Means, type Side } from "./side";
import { changes as texts } from "./texts";
import { Unreadable } from "./safetensors";

/** The smallest changes that count: `Thresholds` in Python. */
export const LIMITS = { share: 0.05, nats: 0.25, logits: 1, ratio: 1.25, errors: 3, map: 0.1, received: 0.1 };

/** A quantity of one head on both sides; `size` is in thresholds. */
export interface Change {
  name: string;
  before: number | null;
  after: number | null;
  size: number; // NaN where a side does not have it
  moved: boolean;
}

export interface HeadChange {
  layer: number; // of A
  other: number; // the same layer of B
  head: number;
  changes: Change[]; // the largest first
  map: number | null; // total variation between the maps; null where they cannot be compared
  received: number | null;
  broken: [number, number];
  moved: boolean;
  size: number; // of what moved most; of a head that did not move, of its largest change
}

export interface Compared {
  heads: HeadChange[]; // the heads that moved, the largest change first, and then the others
  moved: number;
  notes: (() => string)[]; // in the language of the page
  only: { side: "A" | "B"; names: (() => string)[] }[]; // layers, heads and statistics that one side alone has
  maps: boolean; // whether maps were compared
}

/** Distances of the heads of a layer of B, where they are known. */
export type Distances = { map: (number | null)[]; received: (number | null)[] } | null;

/** Layers that are the same on both sides: by name, or by number with a page of a single text, which has no names. */
function pairs(a: Side, b: Side): [Layer, Layer][] {
  const by = (name: (layer: Layer) => string) => {
    const others = new Map(b.layers.map((layer) => [name(layer), layer]));
    return a.layers.flatMap((layer): [Layer, Layer][] => (others.has(name(layer)) ? [[layer, others.get(name(layer))!]] : []));
  };
  const numbered = [a, b].some((side) => side.layers.every((layer, n) => layer.name === String(n)));
  return by(numbered ? (layer) => layer.short : keyOf).filter(([one, other]) => !numbered || one.heads === other.heads);
}

type Part = Origin["layers"][string][2];

function clash(one: Part, other: Part): boolean {
  if (!one || !other) return one !== other;
  if (one[0] !== other[0] || (one[1] === null) !== (other[1] === null)) return true;
  return String(one[1]) !== String(other[1]) || (one[2].startsWith("process") && other[2].startsWith("process") && one[2] !== other[2]);
}

/** The layers that both have. An error says in one sentence why two recordings cannot be compared. */
export function comparable(a: Side, b: Side): [Layer, Layer][] {
  const shared = pairs(a, b);
  const [old, later] = [a.origin, b.origin];
  if (old && later) {
    if (old.config !== later.config || (!old.config && old.model !== later.model)) throw new Unreadable(texts.otherModel(old.model, later.model, old.model === later.model));
    for (const [one, other] of shared) {
      const [mine, theirs] = [old.layers[keyOf(one)], later.layers[keyOf(other)]];
      if (one.heads !== other.heads || clash(mine?.[2] ?? null, theirs?.[2] ?? null)) throw new Unreadable(texts.otherHeads(one.short, one.heads, other.heads));
      if (mine && theirs && (mine[0] !== theirs[0] || mine[1] !== theirs[1])) throw new Unreadable(texts.otherWidths(one.short, mine[0], theirs[0]));
    }
  }
  if (shared.length === 0) throw new Unreadable(texts.noLayers(a.layers[0].name, b.layers[0].name));
  return shared;
}

/** Whether the same share of the rows was observed. */
function samePlaces(a: Layer, b: Layer): boolean {
  return a.lookedAt * b.of === b.lookedAt * a.of;
}

/** Whether the maps of two layers have the same bins of the same shares. */
export function sameBins(a: Layer, b: Layer): boolean {
  return a.map !== null && b.map !== null && a.map.rows === b.map.rows && a.map.columns === b.map.columns && (a.bins ?? b.bins) === (b.bins ?? a.bins);
}

/** The distances of all heads; `progress` is called with the number of each. */
export async function distancesOf(a: Side, b: Side, shared: [Layer, Layer][], progress: (head: number, of: number) => void, signal: AbortSignal): Promise<Distances[]> {
  const found: Distances[] = b.layers.map(() => null);
  const of = shared.reduce((sum, [one, other]) => sum + Math.min(one.heads, other.heads), 0);
  let [done, paused, told] = [0, performance.now(), 0];
  for (const [one, other] of shared) {
    const columns = (found[other.index] = { map: [] as (number | null)[], received: [] as (number | null)[] });
    for (let head = 0; head < Math.min(one.heads, other.heads); head++) {
      if (performance.now() - paused > 50) { // the page stays responsive
        if (performance.now() - told > 250) progress(done, of), (told = performance.now());
        await new Promise((next) => setTimeout(next));
        paused = performance.now();
      }
      signal.throwIfAborted();
      const [x, y] = [await a.sums(one.index, head), await b.sums(other.index, head)];
      const may = samePlaces(one, other);
      columns.map.push(may && x.map && y.map && sameBins(one, other) ? variation(x.map, y.map) : null);
      columns.received.push(may && x.received && y.received ? variation(x.received, y.received) : null);
      done++;
    }
  }
  return found;
}

/** Total variation between two lists of weights, each divided by its sum; null where one has no weight, infinite where one is not finite. */
function variation(x: Float64Array, y: Float64Array): number | null {
  const sum = (values: Float64Array) => values.reduce((before, value) => before + value, 0);
  const [a, b] = [sum(x), sum(y)];
  if (!Number.isFinite(a) || !Number.isFinite(b)) return Infinity;
  if (!(a > 0 && b > 0)) return null;
  let total = 0;
  for (let n = 0; n < Math.max(x.length, y.length); n++) total += Math.abs((n < x.length ? x[n] / a : 0) - (n < y.length ? y[n] / b : 0));
  return total / 2;
}

/** `here`: the page itself computed the distances. */
export function compared(a: Side, b: Side, shared: [Layer, Layer][], distances: Distances[], here: boolean): Compared {
  const units = new Map([...b.names, ...a.names].map(({ name, unit }) => [name, unit ?? "share"]));
  const heads = shared.flatMap(([one, other]) =>
    Array.from({ length: Math.min(one.heads, other.heads) }, (_, head) => headChange(a, b, one, other, head, units, distances[other.index])));
  heads.sort((x, y) => Number(y.moved) - Number(x.moved) || y.size - x.size || x.layer - y.layer || x.head - y.head);
  return { heads, moved: heads.filter((each) => each.moved).length, notes: notesOf(a, b, shared, here), only: onlyIn(a, b, shared), maps: heads.some((each) => each.map !== null) };
}

function headChange(a: Side, b: Side, one: Layer, other: Layer, head: number, units: Map<string, string>, distances: Distances): HeadChange {
  const [mine, theirs] = [a.statistics[one.index], b.statistics[other.index]];
  const changes: Change[] = [];
  for (const name of Object.keys(mine)) {
    const unit = units.get(name) ?? "share";
    if (!(name in theirs) || unit === "input" || !isOneMeasure(name, one, other)) continue;
    changes.push(change(name, mine[name], theirs[name], head, unit));
  }
  changes.push(...betweenSegments(a, b, one, other, head));
  const far = (value: number | null | undefined) => (value === -1 ? Infinity : (value ?? null)); // JSON has no infinity
  const [map, received] = [far(distances?.map[head]), far(distances?.received[head])];
  const broken: [number, number] = [one.broken[head], other.broken[head]];
  const sizes = changes.filter((each) => each.moved).map((each) => each.size);
  if (map !== null && map >= LIMITS.map) sizes.push(map / LIMITS.map);
  if (received !== null && received >= LIMITS.received) sizes.push(received / LIMITS.received);
  if (broken[0] > 0 !== broken[1] > 0) sizes.push(Infinity);
  changes.sort((x, y) => Number(y.moved) - Number(x.moved) || (y.size === y.size ? y.size : -1) - (x.size === x.size ? x.size : -1));
  const moved = sizes.length > 0;
  if (!moved) sizes.push(...[...changes.map((each) => each.size), (map ?? 0) / LIMITS.map, (received ?? 0) / LIMITS.received].filter((size) => size === size));
  return { layer: one.index, other: other.index, head, changes, map, received, broken, moved, size: Math.max(0, ...sizes) };
}

/** Whether a name means the same on both sides: `first` depends on the number of first keys. */
function isOneMeasure(name: string, one: Layer, other: Layer): boolean {
  if (name !== "first" && !name.startsWith("streaming_")) return true;
  return (one.first ?? null) === null || (other.first ?? null) === null || one.first === other.first;
}

type Columns = Data["statistics"][number][string];

/** Whether the spread of the rows is not known, as on pages of single texts. */
function withoutSpread(columns: Columns): boolean {
  return columns.std.every((each) => each === null);
}

function change(name: string, old: Columns, later: Columns, head: number, unit: string): Change {
  const [n, m] = [old.count[head] ?? 0, later.count[head] ?? 0];
  const [before, after] = [old.mean[head], later.mean[head]];
  const variance = (columns: Columns, count: number) => (withoutSpread(columns) ? 0 : (columns.std[head] ?? NaN) ** 2 / count);
  if (!n || !m) return { name, before, after, size: NaN, moved: false };
  const error = Math.sqrt(variance(old, n) + variance(later, m));
  if (before === null || after === null || (!Number.isFinite(error) && before !== after)) return { name, before, after, size: Infinity, moved: true };
  const size = sizeOf(before, after, unit);
  return { name, before, after, size, moved: size >= 1 && Math.abs(after - before) >= LIMITS.errors * error };
}

/** A change in thresholds of its unit. */
function sizeOf(before: number, after: number, unit: string): number {
  if (unit !== "ratio") return Math.abs(after - before) / (unit === "nats" ? LIMITS.nats : unit === "logits" ? LIMITS.logits : LIMITS.share);
  const [low, high] = [Math.min(before, after), Math.max(before, after)];
  return low === high ? 0 : low <= 0 ? Infinity : Math.log(high / low) / Math.log(LIMITS.ratio);
}

function betweenSegments(a: Side, b: Side, one: Layer, other: Layer, head: number): Change[] {
  const [old, later] = [a.segments(one.index, head), b.segments(other.index, head)];
  if (!old || !later || String(old.names) !== String(later.names)) return [];
  const all = old.names.map((_, n) => n);
  const changes = (one: Means["mean"], other: Means["mean"], keys: number[], end: string) => all.flatMap((x) => keys.map((y) => {
    const [before, after] = [one(x, y), other(x, y)];
    const size = Math.abs(after - before) / LIMITS.share;
    const value = (mean: number) => (mean === mean ? mean : null);
    return { name: `segments/${old.names[x]}/${old.names[y]}${end}`, before: value(before), after: value(after), size, moved: size >= 1 };
  }));
  const held = old.holders.filter((n) => later.holders.includes(n));
  const without = old.withoutFirst && later.withoutFirst ? changes(old.withoutFirst, later.withoutFirst, held, "/without_first") : [];
  return [...changes(old.mean, later.mean, all, ""), ...without];
}

/** What one side alone has. */
function onlyIn(a: Side, b: Side, shared: [Layer, Layer][]): Compared["only"] {
  const found: Compared["only"] = [];
  for (const [label, mine, theirs, layers, others] of [["A", a, b, shared.map(([x]) => x), shared.map(([, y]) => y)], ["B", b, a, shared.map(([, y]) => y), shared.map(([x]) => x)]] as const) {
    const only = mine.layers.filter((layer) => !layers.includes(layer)).map((layer) => () => texts.layer(layer.short));
    layers.forEach((layer, n) => layer.heads > others[n].heads && only.push(() => texts.heads(layer.short, layer.heads - others[n].heads)));
    const quantities = new Set(layers.flatMap((layer, n) => Object.keys(mine.statistics[layer.index]).filter((name) => !(name in theirs.statistics[others[n].index]))));
    const every = [...only, ...[...quantities].map((name) => () => say(name.replaceAll("_", " ")))];
    if (every.length > 0) found.push({ side: label, names: every });
  }
  return found;
}

/** How the two differ otherwise, and what is not exact. */
function notesOf(a: Side, b: Side, shared: [Layer, Layer][], here: boolean): (() => string)[] {
  const notes: (() => string)[] = [];
  if (here && [data.bits, shared[0][1].other?.bits].includes(8) && shared.some(([x, y]) => x.map && sameBins(x, y))) notes.push(() => texts.rough);
  for (const [what, of] of [
    ["runs", (layer: Layer) => layer.runs], ["lookedAt", (layer: Layer) => layer.lookedAt], ["keys", (layer: Layer) => (layer.received ? layer.receivedOf : (layer.lengths?.[1] ?? 0))],
    ["first", (layer: Layer) => layer.first ?? 0], ["bins", (layer: Layer) => layer.bins ?? 0],
  ] as const) {
    const numbers = shared.map((pair) => pair.map(of));
    const sides = [0, 1].map((side) => numbers.map((each) => each[side]).filter(Boolean));
    if (what === "lookedAt" && shared.some(([x, y]) => String(x.lengths) !== String(y.lengths))) continue; // their lengths say it
    if (numbers.some(([x, y]) => x !== y) && sides.every((side) => side.length > 0)) notes.push(() => texts.different(what, sides.map((side) => [Math.min(...side), Math.max(...side)] as const)));
  }
  const withMaps = shared.filter(([x, y]) => x.map && y.map);
  const unlike = withMaps.filter(([x, y]) => !sameBins(x, y));
  if (withMaps.some(([x, y]) => sameBins(x, y) && x.lengths && y.lengths && String(x.lengths) !== String(y.lengths))) notes.push(() => texts.otherCells);
  if (unlike.length > 0) notes.push(() => texts.unlikeMaps(unlike.length === withMaps.length));
  if (!shared.every(([x, y]) => samePlaces(x, y))) notes.push(() => texts.otherSample);
  const segments = shared.map(([x, y]) => [a.segments(x.index, 0), b.segments(y.index, 0)]);
  if (segments.some(([x, y]) => x && y && String(x.names) !== String(y.names))) notes.push(() => texts.otherSegments);
  if (![a, b].every((side) => Object.values(side.statistics[0]).some((columns) => !withoutSpread(columns)))) notes.push(() => texts.noSpread);
  if (!a.origin || !b.origin) notes.push(() => texts.unchecked(!a.origin && !b.origin ? "AB" : a.origin ? "B" : "A"));
  return notes;
}
