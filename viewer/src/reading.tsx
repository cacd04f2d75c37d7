// The text itself, with a line for each weight between two tokens; of several heads in several colours.

import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { data, type Head, head as decoded, type Layer, queryAt, readable, token } from "./data";
import type { Field } from "./field";
import type { Paper } from "./figure";
import { FigureMenu } from "./figure_menu";
import { all, bestPattern } from "./grid";
import { textFigure } from "./reading_figure";
import { EveryHead, HAS_EVERY } from "./reading_heads";
import { curve, inText, isBlank, linesOf, MOST_LINES, OVERVIEW, type Pair, pairsOf, type Place, roomOf, strengths, wordsOf } from "./reading_lines";
import { selected } from "./selection";
import { useRoving } from "./roving";
import { useWidth } from "./screen";
import type { State } from "./state";
import { fill, figure, figures, names, NO_VALUE, percent, reading as texts, whole } from "./texts";
import { nameOf } from "./words";

export const PAGE = 200; // tokens in sight at once
const FEW = PAGE / 5; // so many more stay on the last page: a page of ten tokens shows none of their lines
const MOST_HEADS = 4;
export const LISTED = 10; // keys of the list
export const AROUND = 3; // tokens of context on each side of a key
const SMALLEST = 0.001; // weights below it are not listed
const LEAST_MISSING = 0.01; // of the weight: less may be the rounding of the others
export const COLOURS = ["--line-1", "--line-2", "--line-3", "--line-4"];

/** The decoded heads; null until all are there. */
function useHeads(places: Place[]): Head[] | null {
  const key = places.join(" ");
  const [found, setFound] = useState<{ key: string; heads: Head[] } | null>(null);
  useEffect(() => {
    let stale = false;
    void Promise.all(places.map(([layer, head]) => decoded(layer, head))).then((heads) => !stale && setFound({ key, heads }));
    return () => void (stale = true);
  }, [key]);
  return found?.key === key ? found.heads : null;
}

interface Props {
  state: State;
  theme: string;
  change: (part: Partial<State>) => void;
}

export function Reading({ state, theme, change }: Props) {
  const places: Place[] = [[state.layer, state.head] as Place, ...state.also].filter(([layer]) => readable(data.layers[layer]));
  const heads = useHeads(places);
  const [over, setOver] = useState<number | null>(null);
  const [left, setLeft] = useState<number | null>(null); // the token that the pointer or the focus was on last
  const [preview, setPreview] = useState<Place | null>(null); // a head of the table below
  const previewed = useHeads(preview ? [preview] : []);
  const length = data.tokens!.labels.length;
  const kept = state.token !== null && state.token < length ? state.token : null;
  const pages = pagesOf(length);
  const page = Math.min(state.page ?? (kept === null ? 0 : Math.floor(kept / PAGE)), pages - 1);
  const [start, stop] = [page * PAGE, page === pages - 1 ? length : (page + 1) * PAGE];
  const told = over ?? kept ?? (left !== null && left >= start && left < stop ? left : stop - 1);
  const shown = preview && previewed ? { places: [preview], heads: previewed, at: told } : { places, heads: heads ?? [], at: over ?? kept };
  const { pairs, cut } = linesOf(shown.places, shown.heads, shown.at, state.toward, [start, stop]);
  const listed = preview && previewed ? { places: [preview], heads: previewed, at: told } : { places, heads: heads ?? [], at: kept };
  const sides = state.toward === "both" ? (["from", "to"] as const) : [state.toward];
  const go = (to: number) => change(selected(to, state));
  const point = (to: number | null) => {
    setOver(to);
    if (to !== null) setLeft(to);
  };
  const figureOn = (paper: Paper) => textFigure({ places, start, stop, kept, toward: state.toward, ...linesOf(places, heads ?? [], kept, state.toward, [start, stop]) }, paper);
  return (
    <section aria-labelledby="reading-title" class="reading">
      <h2 id="reading-title">{texts.title}</h2>
      <p class="hint">{shown.at === null ? texts.hintAll(percent(OVERVIEW), cut ? MOST_LINES : null) : texts.hint} {exact(places) ? "" : texts.largestOnly}</p>
      <Choice {...{ state, places, change }}>{heads && <FigureMenu of={figures.reading} make={figureOn} />}</Choice>
      {pages > 1 && <Pages {...{ page, pages, start, stop, length, change }} />}
      <div class="reading-columns">
        <div class="reading-main">
          <Text {...{ start, stop, at: shown.at, kept, pairs, theme }} setOver={point} keep={(to) => change(to === kept ? { token: null, page } : selected(to, state))} />
          {HAS_EVERY && <EveryHead at={told} toward={state.toward} shown={places[0]} preview={setPreview} choose={([layer, head]) => change({
            layer, head, row: null, column: null, also: state.also.filter(([l, h]) => l !== layer || h !== head), token: told,
          })} />}
        </div>
        <div class="reading-side" aria-live="polite">
          {listed.at === null ? <p class="hint">{texts.choose}</p> : listed.places.map((place, n) => listed.heads[n] && sides.map((side) => (
            <Keys key={`${side} ${place.join(".")}`} {...{ place, side, go }} at={listed.at!} head={listed.heads[n]} colour={COLOURS[n]} />
          )))}
        </div>
      </div>
    </section>
  );
}

/** How many pages a text has: the last one may be longer than the others. */
export function pagesOf(length: number): number {
  return Math.max(1, Math.ceil((length - FEW) / PAGE));
}

/** A head with the pattern that it matches. */
export function described(layer: number, head: number): string {
  return [nameOf(layer, head), bestPattern({ layer, head })].filter((part) => part && part !== NO_VALUE).join(" · ");
}

function exact(places: Place[]): boolean {
  return places.every(([layer]) => data.layers[layer].map?.exact);
}

function Choice({ state, places, change, children }: { state: State; places: Place[]; change: Props["change"]; children: ComponentChildren }) {
  const others = all().filter(({ layer, head }) => readable(data.layers[layer]) && !places.some(([l, h]) => l === layer && h === head));
  return (
    <p class="switches">
      {places.map(([layer, head], n) => (
        <span key={`${layer}.${head}`} class="swatch" style={{ borderColor: `var(${COLOURS[n]})` }}>
          {n === 0 ? (
            <select aria-label={texts.first} value={`${layer}.${head}`} onChange={(event) => {
              const [to, number] = event.currentTarget.value.split(".").map(Number);
              change({ layer: to, head: number, row: null, column: null });
            }}>
              {[{ layer, head }, ...others].sort((a, b) => a.layer - b.layer || a.head - b.head).map((each) => <option key={`${each.layer}.${each.head}`} value={`${each.layer}.${each.head}`}>{described(each.layer, each.head)}</option>)}
            </select>
          ) : described(layer, head)}
          {n > 0 && <button type="button" aria-label={texts.remove(nameOf(layer, head))} onClick={() => change({ also: state.also.filter(([l, h]) => l !== layer || h !== head) })}>×</button>}
        </span>
      ))}
      {places.length < MOST_HEADS && (
        <label>{texts.add}{" "}
          <select value="" onChange={(event) => {
            const [layer, head] = event.currentTarget.value.split(".").map(Number);
            event.currentTarget.value = "";
            change({ also: [...state.also, [layer, head]] });
          }}>
            <option value="">{texts.addOne}</option>
            {others.map(({ layer, head }) => <option key={`${layer}.${head}`} value={`${layer}.${head}`}>{described(layer, head)}</option>)}
          </select>
        </label>
      )}
      <label>{texts.direction}{" "}
        <select value={state.toward} onChange={(event) => change({ toward: event.currentTarget.value as State["toward"] })}>
          {Object.entries(texts.directions).map(([name, text]) => <option key={name} value={name}>{text}</option>)}
        </select>
      </label>
      {children}
    </p>
  );
}

interface PagesProps {
  page: number;
  pages: number;
  start: number;
  stop: number;
  length: number;
  change: Props["change"];
}

export function Pages({ page, pages, start, stop, length, change }: PagesProps) {
  const turn = (to: number) => to >= 0 && to < pages && change({ page: to });
  return (
    <p class="switches">
      <button type="button" aria-disabled={page === 0} onClick={() => turn(page - 1)}>{texts.before}</button>
      <span>{texts.range(start, stop - 1, length)}</span>
      <button type="button" aria-disabled={page === pages - 1} onClick={() => turn(page + 1)}>{texts.after}</button>
    </p>
  );
}

interface TextProps {
  start: number;
  stop: number;
  at: number | null;
  kept: number | null;
  pairs: Pair[][];
  theme: string;
  setOver: (at: number | null) => void;
  keep: (at: number) => void;
  word?: (at: number, long?: boolean) => string; // the text of a token
}

export function Text({ start, stop, at, kept, pairs, theme, setOver, keep, word = (position, long) => token(position, long) ?? "" }: TextProps) {
  const frame = useRef<HTMLDivElement>(null);
  const width = useWidth(frame);
  const [lines, setLines] = useState<{ d: string; p: number; n: number }[]>([]);
  const strongest = strengths(pairs, at);
  const drawn = pairs.map((each) => each.map(({ query, key }) => `${query}-${key}`).join()).join("|");
  useLayoutEffect(() => {
    const { room, wide } = layOut(frame.current!);
    const box = frame.current!.getBoundingClientRect();
    const place = (position: number) => {
      const chip = frame.current!.querySelector(`[data-at="${position}"]`)?.getBoundingClientRect();
      return chip ? { x: chip.left + chip.width / 2 - box.left, y: chip.top - box.top, height: chip.height } : null;
    };
    setLines(pairs.flatMap((each, n) => each.flatMap(({ query, key, p }) => {
      const [a, b] = [place(query), place(key)];
      return a && b && query !== key ? [{ d: curve(a, b, n, room, wide), p, n }] : [];
    })));
  }, [drawn, width, start, stop, theme]);
  return (
    <div class="reading-text" ref={frame} onMouseLeave={() => setOver(null)} {...useRoving(frame, "button", { first: ".chosen" })}>
      <svg aria-hidden="true" width="100%" height="100%">
        {lines.map(({ d, p, n }, index) => <path key={index} d={d} style={{ stroke: `var(${COLOURS[n]})`, strokeWidth: `${0.8 + 3.5 * p}px`, opacity: 0.25 + 0.75 * Math.min(1, p) }} />)}
      </svg>
      {wordsOf(start, stop, word).map((pieces) => <span class="word" key={pieces[0]}>{pieces.map((position) => {
        const found = strongest.get(position);
        const style = found ? { backgroundImage: fillOf(found) } : {};
        return (
          <button type="button" key={position} data-at={position} style={style} class={[position === at && "chosen", isBlank(word(position)) && "blank"].filter(Boolean).join(" ")} aria-pressed={position === kept}
            title={names.chip(position, word(position, true), found ? figure(Math.max(...found)) : "")}
            onMouseEnter={() => setOver(position)} onFocus={() => setOver(position)} onBlur={() => setOver(null)} onClick={() => keep(position)}>
            <bdi>{inText(word(position))}</bdi>
          </button>
        );
      })}</span>)}
    </div>
  );
}

/** Gives the lines of the text as much room for arcs as their number leaves, above the first one, too; and the width of the text. */
function layOut(frame: HTMLElement): { room: number; wide: number } {
  const chips = [...frame.querySelectorAll("button")].map((each) => each.getBoundingClientRect());
  const lines = new Set(chips.map(({ top }) => Math.round(top))).size;
  const wide = Math.max(...chips.map(({ right }) => right)) - Math.min(...chips.map(({ left }) => left));
  const room = Math.round(roomOf(lines, wide));
  frame.style.lineHeight = `${room + Math.round(chips[0].height)}px`;
  frame.style.paddingTop = `${room / 2}px`;
  frame.style.marginBottom = `${8 - room / 2}px`; // the last line has no arcs below it
  return { room, wide };
}

/** The fill of a token: a band in the colour of each head, as strong as its weight. */
function fillOf(weights: number[]): string {
  const bands = weights.map((p, n) => [p > 0 ? `color-mix(in srgb, var(${COLOURS[n]}) ${Math.round(10 + 60 * p)}%, transparent)` : "transparent", n / weights.length, (n + 1) / weights.length] as const);
  return `linear-gradient(to bottom, ${bands.map(([colour, from, to]) => `${colour} ${100 * from}% ${100 * to}%`).join(", ")})`;
}

interface KeysProps {
  place: Place;
  head: Head;
  at: number;
  go: (to: number) => void;
  colour: string;
  title?: string;
  side?: "from" | "to"; // the keys of a query, or the queries of a key
  shown?: Field; // the values of an exact map as it is drawn, without its first column or with it
}

/** A weight as the map shows it; NaN where it hides the key. */
function shownAt({ values, columns }: Field, layer: Layer, { query, key }: Pair): number {
  return values[(query - queryAt(layer, 0)) * columns + key];
}

/** What share of the weights of a token the page does not hold; "" where it holds all that is worth a mention. */
export function missing(pairs: Pair[]): string {
  const share = 1 - pairs.reduce((sum, { p }) => sum + p, 0);
  return share >= LEAST_MISSING ? texts.missing(percent(share)) : "";
}

/** The keys with the largest weights of a token, or the queries with the largest weights on it, wherever in the text they are, with the tokens around them. */
export function Keys({ place: [layer, number], head, at, go, colour, title, shown, side = "from" }: KeysProps) {
  const from = side === "from";
  const known = pairsOf(data.layers[layer], head, at, from);
  const found = known.map((pair) => (shown ? { ...pair, p: shownAt(shown, data.layers[layer], pair) } : pair)).filter(({ p }) => p >= SMALLEST).sort((a, b) => b.p - a.p).slice(0, LISTED);
  const place = ({ query, key }: Pair) => (from ? key : query);
  const around = (start: number, to: number) => Array.from({ length: Math.max(0, to - start) }, (_, n) => token(start + n) ?? "").join("");
  const most = found.length ? String(whole(Math.max(...found.map(place)))).length : 1;
  return (
    <>
      <h3 style={{ borderLeft: `4px solid var(${colour})`, paddingLeft: "0.4rem" }}>{fill(title ?? (from ? texts.attends : texts.attendedBy), { head: nameOf(layer, number), token: <bdi>{names.inQuotes(token(at, true)!)}</bdi>, at: whole(at) })}</h3>
      {found.length === 0 ? <p class="hint">{from ? texts.noQuery : texts.noneAttends}</p> : (
        <ol class="ranks context">
          {found.map((pair) => [place(pair), pair.p] as const).map(([key, p], n) => ( // by their order: a button in focus stays when the list is another one
            <li key={n}>
              <button type="button" onClick={() => go(key)} title={texts.goTo(key)}>
                <small style={{ minWidth: `${most}ch` }}>{texts.at(key)}</small> <bdi><span class="ahead"><span>{around(Math.max(0, key - AROUND), key)}</span></span><b>{token(key)}</b><span class="after">{around(key + 1, key + 1 + AROUND)}</span></bdi>
              </button>
              <span class="meter" aria-hidden="true"><i style={{ width: `${100 * p}%`, background: `var(${colour})` }} /></span>
              <span>{percent(p)}</span>
            </li>
          ))}
        </ol>
      )}
      {from && found.length > 0 && !data.layers[layer].map?.exact && <p class="hint">{missing(known)}</p>}
    </>
  );
}

