// Which weights the text with lines draws, and the form of its lines, on the screen and in figures.

import { data, type Head, type Layer, NONE, queryAt, token } from "./data";
import type { State } from "./state";

export const FAINTEST = 0.02; // of the weights of a token, those below get no line
export const OVERVIEW = 0.15; // where no token is chosen, the same
export const MOST_LINES = 40; // where no token is chosen: more lie on one another

/** A weight between two positions of the text. */
export interface Pair {
  query: number;
  key: number;
  p: number;
}

export type Place = [number, number];

/** The weights of a query, or those on a key; where a map has pooled them, the largest ones that are known. */
export function pairsOf(layer: Layer, head: Head, at: number, from: boolean): Pair[] {
  const [queries, keys] = layer.lengths!;
  const first = queryAt(layer, 0);
  const map = layer.map?.exact ? head.map : null;
  const weights = (query: number): Pair[] => {
    if (query < 0 || query >= queries) return [];
    if (map) return Array.from({ length: keys }, (_, key) => ({ query: first + query, key, p: map.mean[query * keys + key] })).filter(({ p }) => p > 0);
    const { each, p, keys: tops } = head.top!;
    return Array.from({ length: each }, (_, n) => query * each + n).filter((n) => tops[n] !== NONE).map((n) => ({ query: first + query, key: tops[n], p: p[n] }));
  };
  if (from) return weights(at - first);
  return Array.from({ length: queries }, (_, query) => weights(query).find(({ key }) => key === at)).filter((pair) => pair !== undefined);
}

/** The lines of each head: those of a token, or of all tokens in sight the largest; and whether there are more than are drawn. */
export function linesOf(places: Place[], heads: Head[], at: number | null, toward: State["toward"], sight: [number, number]): { pairs: Pair[][]; cut: boolean } {
  const each = heads.map((head, n) => (at === null ? overview : ofToken(at, toward))(data.layers[places[n][0]], head, sight));
  const all = each.flat();
  if (at !== null || all.length <= MOST_LINES) return { pairs: each, cut: false };
  const drawn = new Set(all.sort((a, b) => b.p - a.p).slice(0, MOST_LINES));
  return { pairs: each.map((pairs) => pairs.filter((pair) => drawn.has(pair))), cut: true };
}

const ofToken = (at: number, toward: State["toward"]) => (layer: Layer, head: Head): Pair[] => {
  const found = [...(toward !== "to" ? pairsOf(layer, head, at, true) : []), ...(toward !== "from" ? pairsOf(layer, head, at, false) : [])];
  return found.filter(({ p }) => p >= FAINTEST);
};

function overview(layer: Layer, head: Head, [start, stop]: [number, number]): Pair[] {
  const found = Array.from({ length: stop - start }, (_, n) => pairsOf(layer, head, start + n, true)).flat();
  return found.filter(({ p, query, key }) => p >= OVERVIEW && key !== query && key > 0 && key >= start && key < stop);
}

/** Of each token at the other end of a line: the largest weight of each head. */
export function strengths(pairs: Pair[][], at: number | null): Map<number, number[]> {
  const strongest = new Map<number, number[]>();
  pairs.forEach((each, n) => each.forEach(({ query, key, p }) => {
    const other = at === null ? key : query === at ? key : query;
    const found = strongest.get(other) ?? pairs.map(() => 0);
    found[n] = Math.max(found[n], p);
    strongest.set(other, found);
  }));
  return strongest;
}

// ---------------------------------------------------------------- the form of a line

export interface Spot {
  x: number;
  y: number;
  height: number;
}

const PEAK = 0.75; // of the height of its control points, how high a curve is
const LOW = 12; // pixels of the control points of the shortest arc
const tallest = (width: number) => Math.min(170, LOW + width / 4);

/** The pixels above a line of text for arcs: the fewer lines, the more, and no more than the widest arc takes. */
export function roomOf(lines: number, width: number): number {
  return Math.min(lines <= 1 ? 128 : lines <= 3 ? 72 : lines <= 6 ? 54 : 24, PEAK * tallest(width));
}

/** An arc above one line of the text, so much higher as it is wider; between two lines, a curve from the lower edge of the upper to the
 * upper edge of the lower. `room` is above each line, `width` that of the text, `n` the number of the head. */
export function curve(a: Spot, b: Spot, n: number, room: number, width: number): string {
  if (Math.abs(a.y - b.y) < 1) {
    const share = (tallest(Math.abs(a.x - b.x)) - LOW) / (tallest(width) - LOW || 1);
    const up = a.y - LOW - share * (room / PEAK - LOW) - 2 * n;
    return `M${a.x} ${a.y}C${a.x} ${up} ${b.x} ${up} ${b.x} ${b.y}`;
  }
  const [upper, lower] = a.y < b.y ? [a, b] : [b, a];
  const [from, to] = [upper.y + upper.height, lower.y];
  const middle = (from + to) / 2;
  return `M${upper.x} ${from}C${upper.x + 4 * n} ${middle} ${lower.x + 4 * n} ${middle} ${lower.x} ${to}`;
}

// ---------------------------------------------------------------- the text itself

const LONGEST = 20; // letters without a place where a line may end
const ALONE = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}\s␣⏎⇥␍]/u;

/** A token as it is in the text: its spaces are spaces. */
export function inText(text: string): string {
  return text.replaceAll("␣", " ");
}

/** Whether a token has nothing but spaces: it is underlined, so that it can be seen and clicked. */
export function isBlank(text: string): boolean {
  return /^␣+$/.test(text);
}

/** Positions in groups between which a line may end: the pieces of a word stay together. */
export function wordsOf(start: number, stop: number, text = (at: number) => token(at) ?? ""): number[][] {
  const words: number[][] = [];
  let [last, length] = ["", 0];
  for (let at = start; at < stop; at++) {
    const letters = [...text(at)];
    const joins = last !== "" && letters.length > 0 && !ALONE.test(last) && !ALONE.test(letters[0]) && length + letters.length <= LONGEST;
    if (joins) words[words.length - 1].push(at);
    else words.push([at]);
    length = (joins ? length : 0) + letters.length;
    last = letters[letters.length - 1] ?? "";
  }
  return words;
}
