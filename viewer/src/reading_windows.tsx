// The text of one window, where the model read a text in windows. Where the page holds q and k of it, all of its weights are known. Maps
// merge all windows, so of another one only some are: those that are the largest of their cell over all windows, and of the head.

import { useEffect, useState } from "preact/hooks";
import { data, type Head, type Layer, range } from "./data";
import { embedded, exactTile, heldWindows } from "./exact";
import type { ExactHead } from "./exact_worker";
import { all } from "./grid";
import { useHead } from "./head";
import { AROUND, COLOURS, described, LISTED, missing, PAGE, Pages, pagesOf, Text } from "./reading";
import { FAINTEST, MOST_LINES, OVERVIEW, type Pair } from "./reading_lines";
import type { State } from "./state";
import { fill, names, percent, reading as texts, reason, whole } from "./texts";
import { Explained, Held, heldHeads } from "./why";
import { nameOf, windowsOf } from "./words";

interface Props {
  state: State;
  theme: string;
  change: (part: Partial<State>) => void;
}

/** The weights of a window that the page holds. */
function pairsOf(layer: Layer, { edges, map }: Head, run: number): Pair[] {
  const found = new Map<string, Pair>();
  const add = (query: number, key: number, p: number) => found.set(`${query} ${key}`, { query, key, p });
  if (map?.places) {
    const { places, max, columns, rows } = map;
    for (let n = 0; n < max.length; n++) {
      if (places.run[n] !== run || places.entry[n] !== 0 || !(max[n] > 0)) continue;
      const [row, column] = layer.map!.ranges ? [range(Math.floor(n / columns), rows, layer.lengths![0])[0], range(n % columns, columns, layer.lengths![1])[0]] : [0, 0];
      add(places.query[n] + row, places.key[n] + column, max[n]);
    }
  }
  for (const { run: of, entry, query, key, p } of edges) if (of === run && entry === 0) add(query, key, p); // not rounded
  return [...found.values()];
}

/** All weights of a token, from q and k; null until they are there, or where the page holds no q and k. */
function useExact(about: ExactHead | null, at: number | null, toward: State["toward"]): Pair[] | null {
  const [found, setFound] = useState<{ about: ExactHead; at: number; toward: string; pairs: Pair[] } | null>(null);
  useEffect(() => {
    if (!about || at === null) return undefined;
    const stop = new AbortController();
    const [queries, keys] = about.lengths;
    const row = async (): Promise<Pair[]> => Array.from((await exactTile(about, [at, at + 1], [0, keys], keys, stop.signal)).mean, (p, key) => ({ query: at, key, p }));
    const column = async (): Promise<Pair[]> => Array.from((await exactTile(about, [0, queries], [at, at + 1], queries, stop.signal)).mean, (p, query) => ({ query, key: at, p }));
    void Promise.all([toward === "to" ? [] : row(), toward === "from" ? [] : column()]).then(
      ([from, to]) => setFound({ about, at, toward, pairs: [...from, ...to.filter(({ query }) => toward === "to" || query !== at)].filter(({ p }) => p > 0) }),
      () => undefined, // another token was chosen before
    );
    return () => stop.abort();
  }, [about, at, toward]);
  return found && found.about === about && found.at === at && found.toward === toward ? found.pairs : null;
}

export function WindowReading({ state, theme, change }: Props) {
  const heads = all().filter(({ layer }) => windowsOf(data.layers[layer]) > 0);
  const { layer, head } = heads.find((each) => each.layer === state.layer && each.head === state.head) ?? heads[0];
  const decoded = useHead(layer, head);
  const [over, setOver] = useState<number | null>(null);
  const { labels, ids } = data.runTokens!;
  const text = ids[state.window];
  const word = (at: number) => labels[text[at]] ?? "";
  const chosen = state.token !== null && state.token < text.length ? state.token : null;
  const pages = pagesOf(text.length);
  const page = Math.min(state.page ?? Math.floor((chosen ?? 0) / PAGE), pages - 1);
  const [start, stop] = [page * PAGE, page === pages - 1 ? text.length : (page + 1) * PAGE];
  const at = over ?? chosen;
  const known = decoded ? pairsOf(data.layers[layer], decoded, state.window) : [];
  const { toward } = state;
  const about = embedded(data.layers[layer], head, state.window);
  const [pointed, listed] = [useExact(about, at, toward), useExact(about, chosen, toward)];
  const ofToken = (token: number) => (pointed ?? known).filter(({ query, key, p }) => p >= FAINTEST && ((toward !== "to" && query === token) || (toward !== "from" && key === token)));
  const overview = known.filter(({ query, key, p }) => p >= OVERVIEW && key !== query && key > 0).sort((a, b) => b.p - a.p);
  const explained = about && chosen !== null ? explainedOf(state, chosen, listed ?? []) : null;
  const shown = at === null ? overview.slice(0, MOST_LINES) : ofToken(at);
  return (
    <section aria-labelledby="reading-title" class="reading">
      <h2 id="reading-title">{texts.title}</h2>
      <p class="hint">{at === null ? texts.hintAll(percent(OVERVIEW), overview.length > MOST_LINES ? MOST_LINES : null) : texts.hint} {about ? texts.everyOfWindow(ids.length) : texts.largestOfWindows(ids.length)}</p>
      {!about && <Elsewhere {...{ layer, head, state, change }} />}
      <p class="switches">
        <label>{texts.window}{" "}
          <select value={state.window} onChange={(event) => change({ window: Number(event.currentTarget.value), token: null, page: null, cell: null })}>
            {ids.map((each, run) => <option key={run} value={run}>{texts.windowOf(run, each.length)}</option>)}
          </select>
        </label>
        <span class="swatch" style={{ borderColor: `var(${COLOURS[0]})` }}>
          <select aria-label={texts.first} value={`${layer}.${head}`} onChange={(event) => {
            const [to, number] = event.currentTarget.value.split(".").map(Number);
            change({ layer: to, head: number, row: null, column: null });
          }}>
            {heads.map((each) => <option key={`${each.layer}.${each.head}`} value={`${each.layer}.${each.head}`}>{described(each.layer, each.head)}</option>)}
          </select>
        </span>
        <label>{texts.direction}{" "}
          <select value={toward} onChange={(event) => change({ toward: event.currentTarget.value as State["toward"] })}>
            {Object.entries(texts.directions).map(([name, label]) => <option key={name} value={name}>{label}</option>)}
          </select>
        </label>
      </p>
      {pages > 1 && <Pages {...{ page, pages, start, stop, length: text.length, change }} />}
      <div class="reading-columns">
        <Text {...{ start, stop, at, kept: chosen, theme, setOver, word }} pairs={[shown]} keep={(to) => change({ cell: null, ...(to === chosen ? { token: null, page } : { token: to, page: null }) })} />
        <div class="reading-side" aria-live="polite">
          {chosen === null ? <p class="hint">{texts.choose}</p> : (toward === "both" ? (["from", "to"] as const) : [toward]).map((side) => (
            <div key={side}>
              <h3>{fill(side === "from" ? texts.attends : texts.attendedBy, { head: nameOf(layer, head), token: <bdi>{names.inQuotes(word(chosen))}</bdi>, at: whole(chosen) })}</h3>
              <Keys pairs={(listed ?? known).filter(({ query, key }) => (side === "from" ? query : key) === chosen)} {...{ side, word, length: text.length, explained }} explain={about && ((cell) => change({ cell }))} go={(token) => change({ token, page: null, cell: null })} />
            </div>
          ))}
          {about && explained && (
            <section class="why" aria-labelledby="why-title">
              <h3 id="why-title">{reason.title}</h3>
              <Explained layer={data.layers[layer]} about={about} at={explained} />
            </section>
          )}
        </div>
      </div>
    </section>
  );
}

/** The selected query and key if the token is one of them, else those of its largest weight. */
function explainedOf({ cell }: State, token: number, pairs: Pair[]): [number, number] | null {
  if (cell?.includes(token)) return cell;
  const [first, ...others] = pairs;
  if (!first) return null;
  const { query, key } = others.reduce((best, pair) => (pair.p > best.p ? pair : best), first);
  return [query, key];
}

/** Where all weights can be had, if not of this head and window: a button for each window, or for each head. */
function Elsewhere({ layer, head, state, change }: { layer: number; head: number; state: State; change: Props["change"] }) {
  const windows = heldWindows(data.layers[layer], head);
  if (data.served || data.exact.length === 0) return null;
  if (windows.length > 0) return <><p class="hint">{texts.heldFor}</p><Held windows={windows} go={(window) => change({ window, token: null, page: null, cell: null })} /></>;
  const go = (each: ExactHead) => {
    const there = heldWindows(data.layers[each.layer], each.head);
    change({ layer: each.layer, head: each.head, row: null, column: null, cell: null, ...(there.includes(state.window) ? {} : { window: each.window ?? state.window, token: null, page: null }) });
  };
  return <p class="hint held">{fill(texts.heldHeads, { heads: heldHeads(go) })}</p>;
}

interface KeysProps {
  pairs: Pair[];
  side: "from" | "to";
  word: (at: number) => string;
  length: number;
  go: (to: number) => void;
  explain: ((cell: [number, number]) => void) | null; // null where the page cannot
  explained: [number, number] | null;
}

/** The keys of a token or its queries, the largest weight first, with the tokens around them. */
function Keys({ pairs, side, word, length, go, explain, explained }: KeysProps) {
  if (pairs.length === 0) return <p class="hint">{texts.noneOfWindow}</p>;
  const around = (from: number, to: number) => Array.from({ length: Math.max(0, Math.min(to, length) - from) }, (_, n) => word(from + n)).join("");
  return (
    <>
    <ol class={`ranks context${explain ? " explained" : ""}`}>
      {[...pairs].sort((a, b) => b.p - a.p).slice(0, LISTED).map(({ query, key: of, p }) => [side === "from" ? of : query, p, query, of]).map(([key, p, query, of], n) => (
        <li key={n}>
          <button type="button" onClick={() => go(key)} title={texts.goTo(key)}>
            <small>{texts.at(key)}</small> <bdi>{around(Math.max(0, key - AROUND), key)}<b>{word(key)}</b>{around(key + 1, key + 1 + AROUND)}</bdi>
          </button>
          <span class="meter" aria-hidden="true"><i style={{ width: `${100 * p}%`, background: `var(${COLOURS[0]})` }} /></span>
          {explain ? <button type="button" class="explain" aria-pressed={explained !== null && explained[0] === query && explained[1] === of} title={texts.whyThis(percent(p))} onClick={() => explain([query, of])}>{texts.why(percent(p))}</button> : <span>{percent(p)}</span>}
        </li>
      ))}
    </ol>
    {side === "from" && <p class="hint">{explain ? "" : missing(pairs)}</p>}
    </>
  );
}
