// What to look at first: a card for each head that stands out against chance, and for the number of those that do not.

import { useState } from "preact/hooks";
import { Attended } from "./attended";
import { data, hasTokens, type Highlight, type Layer, queryAt, token } from "./data";
import { embedded } from "./exact";
import type { Place } from "./grid";
import { alsoInWords, degreeOf } from "./naming";
import type { State } from "./state";
import { cards, fill, percent, whole } from "./texts";
import { binIn, nameOf, windowsOf } from "./words";

const CLEAR = 0.3; // the score from which a head has a name

interface Props {
  state: State;
  change: (part: Partial<State>) => void;
  open: (place: Place, part: Partial<State>) => void;
}

export function Cards({ state, change, open, theme }: Props & { theme: string }) {
  const [over, setOver] = useState<Place | null>(null); // the head of the card under the pointer or in focus
  const highlights = data.highlights.filter(isLabelled);
  if (highlights.length === 0) return null;
  if (!state.cards) {
    return <p class="cards-hidden"><button type="button" aria-expanded="false" onClick={() => change({ cards: true })}>{cards.show}</button></p>;
  }
  return (
    <nav class={`cards${data.image ? " of-image" : ""}`} aria-label={cards.title}>
      {data.image && <Attended {...{ state, theme, change }} place={over ?? state} />}
      <ul onPointerLeave={() => setOver(null)}>
        {highlights.map((each, n) => <li key={n} onPointerEnter={() => setOver(placeOf(each))} onFocusIn={() => setOver(placeOf(each))} onFocusOut={() => setOver(null)}><Card {...{ state, change, open }} highlight={each} /></li>)}
      </ul>
      <button type="button" class="hide" aria-expanded="true" aria-label={cards.hideLabel} title={cards.hideLabel} onClick={() => change({ cards: false })}>×</button>
    </nav>
  );
}

/** Whether heads have the label that a card counts: over an image they are labelled by regions. */
function isLabelled({ pattern, layer }: Highlight): boolean {
  return layer !== null || !pattern || (data.image?.looks.length ?? 0) === 0;
}

function placeOf({ layer, head }: Highlight): Place | null {
  return layer === null || head === null ? null : { layer, head };
}

function Card({ highlight, state, change, open }: Props & { highlight: Highlight }) {
  const { layer, head, pattern, score } = highlight;
  if (layer === null || head === null) {
    const sentence = pattern ? count(highlight) : cards.none;
    if (!pattern) return <p class="card">{sentence}</p>;
    const on = state.pattern === pattern && state.by === "score" && state.least === score && !state.under;
    const part: Partial<State> = on ? { pattern: "", by: "", least: null } : { pattern, by: "score", least: score, under: false };
    return (
      <button type="button" class="card" aria-pressed={on} onClick={() => change(part)}>
        <span>{sentence}</span> <small>{on ? cards.all : cards.only(percent(score!))}</small>
      </button>
    );
  }
  const pair = example(highlight);
  const others = highlight.heads > 1;
  return (
    <>
      <button type="button" class={`card${others ? " of-several" : ""}`} title={highlight.cell ? cards.openCell : cards.open} onClick={() => open({ layer, head }, selection(highlight))}>
        <span><b>{/^[\d.]+$/.test(highlight.name) ? highlight.name : nameOf(layer, head)}</b> {does(highlight)}</span>{" "}
        {pair && <small>{pair}</small>}
      </button>
      {others && <Others {...{ highlight, state, change }} />}
    </>
  );
}

/** The heads with the pattern of a card: a switch that shows only these. */
function Others({ highlight: { pattern, heads }, state, change }: Pick<Props, "state" | "change"> & { highlight: Highlight }) {
  const isRegion = pattern in cards.regions;
  const part: Partial<State> = { pattern, by: isRegion ? "" : "score", least: isRegion ? null : CLEAR, under: false };
  const on = state.pattern === pattern && state.by === part.by && state.least === part.least && !state.under;
  return (
    <button type="button" class="more-heads" aria-pressed={on} title={on ? cards.all : cards.showAll(heads)} onClick={() => change(on ? { pattern: "", by: "", least: null } : part)}>
      {cards.more(heads - 1)}
    </button>
  );
}

/** What the head does, with its score. */
function does({ pattern, score, share, unit, also }: Highlight): string {
  if (pattern in cards.regions) return cards.region(cards.regions[pattern], score!);
  if (pattern === "fixed key") return cards.fixed(percent(share!), unit) + (also ? cards.alone(alsoInWords(also)) : "");
  return cards.match(cards.heads[pattern]?.(unit) ?? pattern, percent(score!) + alsoInWords(also), degreeOf(score!));
}

function count({ pattern, heads, of, unit }: Highlight): string {
  return cards.count(whole(heads), whole(of), cards.counts[pattern]?.(heads === 1, unit) ?? pattern);
}

/** The query and the key of the example, as tokens or patches; of one fixed key only that one. */
function example({ pattern, layer, cell, texts }: Highlight) {
  if (!cell || pattern in cards.regions) return null;
  const of = data.layers[layer!];
  const [query, key] = (data.image ? null : texts) ?? named(of, cell); // patches by their names in the language of the page
  if (pattern === "fixed key") return <bdi>{key}</bdi>;
  return fill(pattern === "induction" && texts ? cards.inductionExample : cards.example, { query: <bdi>{query}</bdi>, key: <bdi>{key}</bdi> });
}

function named(layer: Layer, [query, key]: [number, number]): [string, string] {
  const name = (at: number) => (data.image && hasTokens(layer) && token(at, true)) || whole(at);
  return [name(queryAt(layer, query)), name(key)];
}

/** The bins of the example, which are then selected, and its window; where the window or a server has single weights, the cell itself. */
function selection({ layer, head, cell, run }: Highlight): Partial<State> {
  const of = data.layers[layer!];
  if (!cell || !of.map) return {};
  const [row, column] = [binIn(of, "query", cell[0], run ?? 0), binIn(of, "key", cell[1], run ?? 0)];
  if (row === null || column === null) return {};
  if (windowsOf(of) > 0) return { row, column, zoom: [1, 0.5, 0.5], window: run ?? 0, cell: embedded(of, head!, run ?? 0) ? cell : null };
  const lengths = data.served?.[layer!];
  const served = lengths && of.runs === 1 && cell[0] < lengths[0] && cell[1] < lengths[1];
  return { row, column, zoom: [1, 0.5, 0.5], cell: served ? cell : null };
}
