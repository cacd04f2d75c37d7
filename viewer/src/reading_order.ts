// The order in which changes are read: what a reader sees in a map first, logits last. A logit has no limits of its own, so that by
// thresholds it would lead nearly everywhere.

import type { Compared, HeadChange } from "./comparing";
import { LIMITS } from "./comparing";

export const ENTROPIES = ["entropy", "normalized_entropy"];
const PATTERNS = ["previous", "next", "self", "first", "duplicate", "induction"];
const LOGITS = ["max_logit", "lse"];

/** The place of a change: broken rows, entropy, patterns, the distances of maps, other statistics, logits. */
export function reading(name: string): number {
  if (name === "broken") return 0;
  if (ENTROPIES.includes(name)) return 1;
  if (PATTERNS.includes(name)) return 2;
  if (name === "map" || name === "received") return 3;
  return LOGITS.includes(name) ? 5 : 4;
}

/** The largest change of a head that is not one of logits, in thresholds; 0 where only logits moved. */
function readable({ changes, map, received, broken, moved }: HeadChange): number {
  const sizes = changes.filter((each) => reading(each.name) < reading("lse") && (moved ? each.moved : each.size === each.size)).map((each) => each.size);
  for (const [value, limit] of [[map, LIMITS.map], [received, LIMITS.received]] as const) if (value !== null && (!moved || value >= limit)) sizes.push(value / limit);
  if (broken[0] > 0 !== broken[1] > 0) sizes.push(Infinity);
  return Math.max(0, ...sizes);
}

const orders = new WeakMap<Compared, HeadChange[]>();

/** The heads that moved and then the others, those with the largest change of what can be read first. */
export function inOrder(is: Compared): HeadChange[] {
  let found = orders.get(is);
  if (!found) {
    const sizes = new Map(is.heads.map((head) => [head, readable(head)]));
    const by = (x: HeadChange, y: HeadChange) => {
      const [a, b] = [sizes.get(x)!, sizes.get(y)!];
      return a === b ? 0 : b - a; // two infinite ones are alike
    };
    found = [...is.heads].sort((x, y) => Number(y.moved) - Number(x.moved) || by(x, y));
    orders.set(is, found);
  }
  return found;
}
