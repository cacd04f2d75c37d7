// How a head is named by a pattern, in words: the same rule as src/headscope/stats/_clear.py.

import { data } from "./data";
import { grid, patternNames, percent } from "./texts";

/** The score from which a head has a name. */
export const NAMED = 0.3;

const WHOLE = 0.5; // a head with a smaller score follows its pattern partly
const MOST = 0.8; // and with one below this mostly
const ROUNDING = 0.005; // what whole per cent round up: "partly" never stands before 50 %

/** How much of what its pattern describes a head does; "" is all of it. */
export type Degree = "partly" | "mostly" | "";

/** Whether patterns were scored at all: a head without one then has no name. */
export function isScored(): boolean {
  return data.patterns.some((layer) => layer.some((head) => head.length > 0));
}

export function isPart(score: number): boolean {
  return score < WHOLE - ROUNDING;
}

export function degreeOf(score: number): Degree {
  if (isPart(score)) return "partly";
  return score < MOST - ROUNDING ? "mostly" : "";
}

/** The patterns that a head is named by, with their scores: the best one, and the second one where it is a name, too. */
export function namesOf({ layer, head }: { layer: number; head: number }): [string, number][] {
  const [best, also] = [data.patterns[layer]?.[head]?.[0], data.also[layer]?.[head]];
  return [...(best ? [[best[0], best[1]] as [string, number]] : []), ...(also && also[1] >= NAMED ? [also] : [])];
}

/** The second name of a head in short, "induction"; "" where it has none. */
export function secondName(place: { layer: number; head: number }): string {
  const second = namesOf(place)[1];
  return second ? (patternNames[second[0]] ?? second[0]) : "";
}

/** The name of a head that follows a pattern: "induction", or "partly induction". */
export function nameInWords(pattern: string, score: number): string {
  const name = patternNames[pattern] ?? pattern;
  return isPart(score) ? grid.partly(name) : name;
}

/** The patterns that too few rows show for a score, although this head puts much more weight on their keys than chance gives. */
export function followsUnscored({ layer, head }: { layer: number; head: number }): string[] {
  return Object.entries(data.few ?? {}).filter(([, { heads }]) => heads.some(([l, h]) => l === layer && h === head)).map(([name]) => name);
}

/** Whether no query attends to later tokens, so that the copies of a token are earlier ones. */
export function isCausal(): boolean {
  return data.statistics.every(({ next }) => next === undefined || next.mean.every((each) => each === null));
}

/** The second pattern of a head, as the end of a parenthesis: "; also previous, 31 %". */
export function alsoInWords(also: [string, number] | null | undefined): string {
  return also ? grid.also(patternNames[also[0]] ?? also[0], percent(also[1])) : "";
}

export function alsoOf({ layer, head }: { layer: number; head: number }): string {
  return alsoInWords(data.also[layer]?.[head]);
}
