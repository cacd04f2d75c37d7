// On a page of two recordings: whose heads a view shows, and the switch between them. What the views read is exchanged as a whole.

import { data, Heads, type Layer, ownHeads, showHeads } from "./data";
import { say } from "./languages";
import { other, useOther } from "./other";
import type { Side } from "./side";
import type { State, View } from "./state";
import { whose as texts } from "./texts";

export type Which = "a" | "b";

/** The views of one recording; the others show both, or what this page alone holds. */
const OF_ONE: View[] = ["heads", "head", "reading", "segments", "table"];

const EXCHANGED = ["about", "layers", "statistics", "bits", "tokens", "runTokens", "patterns", "also", "few", "highlights", "opensOn", "exact", "served"] as const;

const own = { ...data };
let shown: Side | null = null; // null = this page's own recording

/** What the page shows of a recording that it is compared with; its layers are in the order of this page's. */
function contentOf(side: Side, label: string): Pick<typeof data, (typeof EXCHANGED)[number]> {
  const at = orderOf(side)!;
  const nothing = at.map(() => []);
  const ordered = <T,>(list: T[] | undefined): T[] | null => list ? at.map((n) => list[n]) : null;
  // an index of this page's, and without `other`: the tokens of the page are its own ones now
  const layers = at.map((n, index): Layer => {
    const { other: _, ...layer } = side.layers[n];
    return { ...layer, index, short: own.layers[index].short };
  });
  return {
    about: [side.origin?.model ?? own.about[0], label], layers, statistics: ordered(side.statistics)!, bits: side.layers[0].other?.bits ?? own.bits,
    tokens: side.tokens, runTokens: side.runTokens, patterns: ordered(side.named?.patterns) ?? nothing, also: ordered(side.named?.also) ?? nothing,
    few: Object.fromEntries(Object.entries(side.named?.few ?? {}).map(([name, few]) => [name, { ...few, heads: few.heads.map(([layer, head]) => [at.indexOf(layer), head] as [number, number]).filter(([layer]) => layer >= 0) }])),
    highlights: side.named?.highlights ?? [], opensOn: null, exact: [], served: null,
  };
}

/** The layers of a recording that are those of this page; null where one is missing, or has other heads. */
function orderOf(side: Side): number[] | null {
  const found = other()!.is.heads;
  const at = own.layers.map((layer, n) => found.find((head) => head.layer === n && side.layers[head.other].heads === layer.heads)?.other ?? -1);
  return at.includes(-1) ? null : at;
}

/** Whether a view can show a recording that the page is compared with: it needs the same heads, and maps of the same bins and lengths. */
function canShow(side: Side, view: View): boolean {
  const at = data.history || own.image ? null : orderOf(side);
  return at !== null && own.layers.every((mine, n) => {
    const theirs = side.layers[at[n]];
    const same = (of: (layer: Layer) => unknown) => String(of(mine)) === String(of(theirs));
    const read = !/^(heads|head|reading)$/.test(view) || same(({ lengths, runs, map }) => [lengths, runs, map && [map.rows, map.columns, map.exact, map.ranges]]);
    const text = view !== "reading" || (same(({ top, kind, of }) => [top, kind, of]) && own.tokens?.labels.length === side.tokens?.labels.length && own.runTokens?.ids.length === side.runTokens?.ids.length);
    return read && text && (view !== "segments" || same(({ segments }) => segments?.names));
  });
}

/** Exchange what the views read, if the state asks for it. Returns which recording is shown. */
export function present({ side, view }: State): Which {
  const found = other();
  const to = side === "b" && found && OF_ONE.includes(view) && canShow(found.side, view) ? found.side : null;
  if (to !== shown) {
    const from: Pick<typeof data, (typeof EXCHANGED)[number]> = to ? contentOf(to, found!.labels[1]) : own;
    for (const name of EXCHANGED) Object.assign(data, { [name]: from[name] });
    const at = to && orderOf(to)!;
    showHeads(to ? new Heads((layer, number) => to.head(at![layer], number)) : ownHeads);
    shown = to;
  }
  return to ? "b" : "a";
}

/** Which recording a view shows, by name, and the switch to the other one. */
export function WhoseHeads({ state, change }: { state: State; change: (part: Partial<State>) => void }) {
  const { other: found } = useOther();
  if (!found || !OF_ONE.includes(state.view)) return null;
  const able = canShow(found.side, state.view);
  const button = (which: Which, label: string) => {
    const [now, may] = [(able ? state.side : "a") === which, which === "a" || able];
    return (
      <button type="button" aria-pressed={now} aria-disabled={!may} title={may ? undefined : texts.unlike} onClick={() => may && change({ side: which })}>
        {which.toUpperCase()}: <bdi>{say(label, true)}</bdi>
      </button>
    );
  };
  return (
    <div class="whose">
      <span>{texts.shows}</span>{" "}
      <span role="group" aria-label={texts.shows}>{button("a", found.labels[0])}{button("b", found.labels[1])}</span>
      {!able && <span class="hint">{texts.unlike}</span>}
    </div>
  );
}

/** The heads of a recording that the page is compared with, by the layers of this page. */
export function pairedLayer(side: Side, layer: number, head: number): Layer | null {
  const found = other()!.is.heads.find((each) => each.layer === layer && each.head === head);
  return found ? side.layers[found.other] : null;
}
