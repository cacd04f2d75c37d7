// The text of one window, where the model read a text in windows. Maps merge all windows, so only some of its weights are known: those that
// are the largest of their cell over all windows, and the largest of the head.

import { useState } from "preact/hooks";
import { data, type Head, type Layer, range } from "./data";
import { all } from "./grid";
import { useHead } from "./head";
import { AROUND, COLOURS, described, LISTED, missing, PAGE, Pages, pagesOf, Text } from "./reading";
import { FAINTEST, MOST_LINES, OVERVIEW, type Pair } from "./reading_lines";
import type { State } from "./state";
import { fill, names, percent, reading as texts, whole } from "./texts";
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
  const ofToken = (token: number) => known.filter(({ query, key, p }) => p >= FAINTEST && ((toward !== "to" && query === token) || (toward !== "from" && key === token)));
  const overview = known.filter(({ query, key, p }) => p >= OVERVIEW && key !== query && key > 0).sort((a, b) => b.p - a.p);
  const shown = at === null ? overview.slice(0, MOST_LINES) : ofToken(at);
  return (
    <section aria-labelledby="reading-title" class="reading">
      <h2 id="reading-title">{texts.title}</h2>
      <p class="hint">{at === null ? texts.hintAll(percent(OVERVIEW), overview.length > MOST_LINES ? MOST_LINES : null) : texts.hint} {texts.largestOfWindows(ids.length)}</p>
      <p class="switches">
        <label>{texts.window}{" "}
          <select value={state.window} onChange={(event) => change({ window: Number(event.currentTarget.value), token: null, page: null })}>
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
        <Text {...{ start, stop, at, kept: chosen, theme, setOver, word }} pairs={[shown]} keep={(to) => change(to === chosen ? { token: null, page } : { token: to, page: null })} />
        <div class="reading-side" aria-live="polite">
          {chosen === null ? <p class="hint">{texts.choose}</p> : (toward === "both" ? (["from", "to"] as const) : [toward]).map((side) => (
            <div key={side}>
              <h3>{fill(side === "from" ? texts.attends : texts.attendedBy, { head: nameOf(layer, head), token: <bdi>{names.inQuotes(word(chosen))}</bdi>, at: whole(chosen) })}</h3>
              <Keys pairs={known.filter(({ query, key }) => (side === "from" ? query : key) === chosen)} {...{ side, word, length: text.length }} go={(token) => change({ token, page: null })} />
            </div>
          ))}
        </div>
      </div>
    </section>
  );
}

/** The keys of a token or its queries, the largest weight first, with the tokens around them. */
function Keys({ pairs, side, word, length, go }: { pairs: Pair[]; side: "from" | "to"; word: (at: number) => string; length: number; go: (to: number) => void }) {
  if (pairs.length === 0) return <p class="hint">{texts.noneOfWindow}</p>;
  const around = (from: number, to: number) => Array.from({ length: Math.max(0, Math.min(to, length) - from) }, (_, n) => word(from + n)).join("");
  return (
    <>
    <ol class="ranks context">
      {[...pairs].sort((a, b) => b.p - a.p).slice(0, LISTED).map(({ query, key: of, p }) => [side === "from" ? of : query, p]).map(([key, p], n) => (
        <li key={n}>
          <button type="button" onClick={() => go(key)} title={texts.goTo(key)}>
            <small>{texts.at(key)}</small> <bdi>{around(Math.max(0, key - AROUND), key)}<b>{word(key)}</b>{around(key + 1, key + 1 + AROUND)}</bdi>
          </button>
          <span class="meter" aria-hidden="true"><i style={{ width: `${100 * p}%`, background: `var(${COLOURS[0]})` }} /></span>
          <span>{percent(p)}</span>
        </li>
      ))}
    </ol>
    {side === "from" && <p class="hint">{missing(pairs)}</p>}
    </>
  );
}
