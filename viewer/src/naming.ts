// How a head is named by a pattern, in words: the same rule as src/headscope/stats/_clear.py.

import { data } from "./data";
import { grid, patternNames, percent } from "./texts";

/** The score from which a head has a name. */
export const NAMED = 0.3;

const WHOLE = 0.5; // a head with a smaller score follows its pattern partly

/** Whether patterns were scored at all: a head without one then has no name. */
export const SCORED = data.patterns.some((layer) => layer.some((head) => head.length > 0));

export function isPart(score: number): boolean {
  return score < WHOLE;
}

/** The name of a head that follows a pattern: "induction", or "partly induction". */
export function nameInWords(pattern: string, score: number): string {
  const name = patternNames[pattern] ?? pattern;
  return isPart(score) ? grid.partly(name) : name;
}

/** The second pattern of a head that follows its best one partly, as the end of a parenthesis: "; also previous, 31 %". */
export function alsoInWords(also: [string, number] | null | undefined): string {
  return also ? grid.also(patternNames[also[0]] ?? also[0], percent(also[1])) : "";
}

export function alsoOf({ layer, head }: { layer: number; head: number }): string {
  return alsoInWords(data.also[layer]?.[head]);
}
