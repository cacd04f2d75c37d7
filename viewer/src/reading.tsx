// The text itself, with a line for each weight between two tokens; of several heads in several colours.

import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { data, type Head, head as decoded, type Layer, NONE, queryAt, readable, token } from "./data";
import { type Figure, measured, origin, type Paper, SMALL } from "./figure";
import { FigureMenu } from "./figure_menu";
import { titled } from "./figures";
import { all, bestPattern } from "./grid";
import { selected } from "./selection";
import { useRoving } from "./roving";
import { useWidth } from "./screen";
import type { State } from "./state";
import { fill, figure, figures, names, NO_VALUE, percent, reading as texts, whole } from "./texts";
import { nameOf } from "./words";

export const PAGE = 200; // tokens in sight at once
const MOST_HEADS = 4;
export const LISTED = 10; // keys of the list
export const AROUND = 3; // tokens of context on each side of a key
const SMALLEST = 0.001; // weights below it are not listed
export const FAINTEST = 0.02; // of the weights of a token, those below get no line
export const OVERVIEW = 0.15; // where no token is chosen, the same
export const COLOURS = ["--line-1", "--line-2", "--line-3", "--line-4"];

/** A weight between two positions of the text. */
export interface Pair {
  query: number;
  key: number;
  p: number;
}

type Place = [number, number];

/** The weights of a query, or those on a key; where a map has pooled them, the largest ones that are known. */
function pairsOf(layer: Layer, head: Head, at: number, from: boolean): Pair[] {
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
  const length = data.tokens!.labels.length;
  const kept = state.token !== null && state.token < length ? state.token : null;
  const page = Math.min(state.page ?? (kept === null ? 0 : Math.floor(kept / PAGE)), Math.ceil(length / PAGE) - 1);
  const [start, stop] = [page * PAGE, Math.min(length, (page + 1) * PAGE)];
  const at = over ?? kept;
  const pairs = (heads ?? []).map((head, n) => linesOf(data.layers[places[n][0]], head, at, state.toward, [start, stop]));
  const go = (to: number) => change(selected(to, state));
  const figureOn = (paper: Paper) => textFigure({
    places, start, stop, kept, toward: state.toward, pairs: (heads ?? []).map((head, n) => linesOf(data.layers[places[n][0]], head, kept, state.toward, [start, stop])),
  }, paper);
  return (
    <section aria-labelledby="reading-title" class="reading">
      <h2 id="reading-title">{texts.title}</h2>
      <p class="hint">{at === null ? texts.hintAll(percent(OVERVIEW)) : texts.hint} {exact(places) ? "" : texts.largestOnly}</p>
      <Choice {...{ state, places, change }}>{heads && <FigureMenu of={figures.reading} make={figureOn} />}</Choice>
      {length > PAGE && <Pages {...{ page, length, change }} />}
      <div class="reading-columns">
        <Text {...{ start, stop, at, kept, pairs, theme, setOver }} keep={(to) => change(to === kept ? { token: null, page } : selected(to, state))} />
        <div class="reading-side" aria-live="polite">
          {kept === null ? <p class="hint">{texts.choose}</p> : places.map((place, n) => heads && (
            <Keys key={place.join(".")} {...{ place, at: kept, go }} head={heads[n]} colour={COLOURS[n]} />
          ))}
        </div>
      </div>
    </section>
  );
}

/** A head with the pattern that it matches. */
export function described(layer: number, head: number): string {
  return [nameOf(layer, head), bestPattern({ layer, head })].filter((part) => part && part !== NO_VALUE).join(" · ");
}

function exact(places: Place[]): boolean {
  return places.every(([layer]) => data.layers[layer].map?.exact);
}

/** The weights that are shown: those of a token, or of all tokens in sight the largest. */
function linesOf(layer: Layer, head: Head, at: number | null, toward: State["toward"], [start, stop]: [number, number]): Pair[] {
  if (at !== null) {
    const found = [...(toward !== "to" ? pairsOf(layer, head, at, true) : []), ...(toward !== "from" ? pairsOf(layer, head, at, false) : [])];
    return found.filter(({ p }) => p >= FAINTEST);
  }
  return Array.from({ length: stop - start }, (_, n) => pairsOf(layer, head, start + n, true)).flat().filter(({ p, query, key }) => p >= OVERVIEW && key !== query && key > 0);
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

export function Pages({ page, length, change }: { page: number; length: number; change: Props["change"] }) {
  const last = Math.ceil(length / PAGE) - 1;
  const turn = (to: number) => to >= 0 && to <= last && change({ page: to });
  return (
    <p class="switches">
      <button type="button" aria-disabled={page === 0} onClick={() => turn(page - 1)}>{texts.before}</button>
      <span>{texts.range(page * PAGE, Math.min(length, (page + 1) * PAGE) - 1, length)}</span>
      <button type="button" aria-disabled={page === last} onClick={() => turn(page + 1)}>{texts.after}</button>
    </p>
  );
}

/** Of each token at the other end of a line: the largest weight of each head. */
function strengths(pairs: Pair[][], at: number | null): Map<number, number[]> {
  const strongest = new Map<number, number[]>();
  pairs.forEach((each, n) => each.forEach(({ query, key, p }) => {
    const other = at === null ? key : query === at ? key : query;
    const found = strongest.get(other) ?? pairs.map(() => 0);
    found[n] = Math.max(found[n], p);
    strongest.set(other, found);
  }));
  return strongest;
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
    const box = frame.current!.getBoundingClientRect();
    const place = (position: number) => {
      const chip = frame.current!.querySelector(`[data-at="${position}"]`)?.getBoundingClientRect();
      return chip ? { x: chip.left + chip.width / 2 - box.left, y: chip.top - box.top, height: chip.height } : null;
    };
    setLines(pairs.flatMap((each, n) => each.flatMap(({ query, key, p }) => {
      const [a, b] = [place(query), place(key)];
      return a && b && query !== key ? [{ d: curve(a, b, n), p, n }] : [];
    })));
  }, [drawn, width, start, theme]);
  return (
    <div class="reading-text" ref={frame} onMouseLeave={() => setOver(null)} {...useRoving(frame, "button", { first: ".chosen" })}>
      <svg aria-hidden="true" width="100%" height="100%">
        {lines.map(({ d, p, n }, index) => <path key={index} d={d} style={{ stroke: `var(${COLOURS[n]})`, strokeWidth: `${0.8 + 3.5 * p}px`, opacity: 0.25 + 0.75 * Math.min(1, p) }} />)}
      </svg>
      {Array.from({ length: stop - start }, (_, n) => start + n).map((position) => {
        const found = strongest.get(position);
        const style = found ? { background: fillOf(found) } : {};
        return (
          <button type="button" key={position} data-at={position} style={style} class={position === at ? "chosen" : ""} aria-pressed={position === kept}
            title={names.chip(position, word(position, true), found ? figure(Math.max(...found)) : "")}
            onMouseEnter={() => setOver(position)} onFocus={() => setOver(position)} onBlur={() => setOver(null)} onClick={() => keep(position)}>
            <bdi>{word(position)}</bdi>
          </button>
        );
      })}
    </div>
  );
}

/** The fill of a token: a band in the colour of each head, as strong as its weight. */
function fillOf(weights: number[]): string {
  const bands = weights.map((p, n) => [p > 0 ? `color-mix(in srgb, var(${COLOURS[n]}) ${Math.round(10 + 60 * p)}%, transparent)` : "transparent", n / weights.length, (n + 1) / weights.length] as const);
  return `linear-gradient(to bottom, ${bands.map(([colour, from, to]) => `${colour} ${100 * from}% ${100 * to}%`).join(", ")})`;
}

interface Spot {
  x: number;
  y: number;
  height: number;
}

/** An arc above one line of the text; between two lines, a curve from the lower edge of the upper to the upper edge of the lower. */
function curve(a: Spot, b: Spot, n: number): string {
  if (Math.abs(a.y - b.y) < 1) {
    const up = a.y - Math.min(22, 5 + Math.abs(a.x - b.x) / 10) - 2 * n;
    return `M${a.x} ${a.y}C${a.x} ${up} ${b.x} ${up} ${b.x} ${b.y}`;
  }
  const [upper, lower] = a.y < b.y ? [a, b] : [b, a];
  const [from, to] = [upper.y + upper.height, lower.y];
  const middle = (from + to) / 2;
  return `M${upper.x} ${from}C${upper.x + 4 * n} ${middle} ${lower.x + 4 * n} ${middle} ${lower.x} ${to}`;
}

/** The keys with the largest weights of a token, wherever in the text they are, with the tokens around them. */
export function Keys({ place: [layer, number], head, at, go, colour, title }: { place: Place; head: Head; at: number; go: (to: number) => void; colour: string; title?: string }) {
  const found = pairsOf(data.layers[layer], head, at, true).filter(({ p }) => p >= SMALLEST).sort((a, b) => b.p - a.p).slice(0, LISTED);
  const around = (from: number, to: number) => Array.from({ length: Math.max(0, to - from) }, (_, n) => token(from + n) ?? "").join("");
  return (
    <>
      <h3 style={{ borderLeft: `4px solid var(${colour})`, paddingLeft: "0.4rem" }}>{fill(title ?? texts.attends, { head: nameOf(layer, number), token: <bdi>{names.inQuotes(token(at, true)!)}</bdi>, at: whole(at) })}</h3>
      {found.length === 0 ? <p class="hint">{texts.noQuery}</p> : (
        <ol class="ranks context">
          {found.map(({ key, p }, n) => ( // by their order: a button in focus stays when the list is another one
            <li key={n}>
              <button type="button" onClick={() => go(key)} title={texts.goTo(key)}>
                <small>{texts.at(key)}</small> <bdi>{around(Math.max(0, key - AROUND), key)}<b>{token(key)}</b>{around(key + 1, key + 1 + AROUND)}</bdi>
              </button>
              <span class="meter" aria-hidden="true"><i style={{ width: `${100 * p}%`, background: `var(${colour})` }} /></span>
              <span>{percent(p)}</span>
            </li>
          ))}
        </ol>
      )}
    </>
  );
}

// ---------------------------------------------------------------- the text as a figure

const WIDE = 640; // units of a line
const HIGH = 34; // from line to line
const TALL = 17; // of a token
const SIZE = 12; // of its letters

interface Drawing {
  places: Place[];
  start: number;
  stop: number;
  kept: number | null;
  toward: State["toward"];
  pairs: Pair[][];
}

function textFigure({ places, start, stop, kept, toward, pairs }: Drawing, { inks }: Paper): Figure {
  const chips: { x: number; y: number; width: number; text: string }[] = [];
  let [x, line] = [0, 0];
  for (let at = start; at < stop; at++) {
    const text = token(at) ?? "";
    const width = Math.min(WIDE, measured(text, SIZE) + 5);
    if (x > 0 && x + width > WIDE) [x, line] = [0, line + 1];
    chips.push({ x, y: 22 + line * HIGH, width, text });
    x += width;
  }
  const titles = places.map(([layer, head]) => names.title(nameOf(layer, head)));
  const legend = places.length > 1 ? 20 : 0;
  const height = 22 + line * HIGH + TALL + legend + 4;
  const width = chips.reduce((most, chip) => Math.max(most, chip.x + chip.width), 0);
  const spot = (position: number) => chips[position - start] && { x: chips[position - start].x + chips[position - start].width / 2, y: chips[position - start].y + legend, height: TALL };
  const shown = pairs.map((each) => each.filter(({ query, key }) => spot(query) && spot(key)));
  return {
    name: `headscope-reading-${places.map((place) => place.join(".")).join("-")}`,
    title: places.length === 1 ? titled(nameOf(...places[0]), bestPattern({ layer: places[0][0], head: places[0][1] })) : titles.join(" · "),
    caption: [
      ...origin(), figures.tokens(start, stop),
      kept === null ? figures.linesOfAll(percent(OVERVIEW)) : figures.linesOfOne(names.quoted(kept, token(kept, true)!), toward, percent(FAINTEST)),
    ],
    body: {
      width, height, plot: { x: 0, y: 0, width, height },
      draw(surface, left, top) {
        if (legend) {
          let at = left;
          titles.forEach((name, n) => {
            surface.box({ x: at, y: top + 2, width: 10, height: 10 }, inks.lines[n]);
            surface.text(name, at + 14, top + 7, { fill: inks.ink, anchor: "start", size: SMALL });
            at += measured(name) + 32;
          });
        }
        strengths(shown, kept).forEach((weights, position) => {
          const { x, y, width } = chips[position - start];
          weights.forEach((p, n) => p > 0 && surface.box({
            x: left + x, y: top + y + legend + (n * TALL) / weights.length, width, height: TALL / weights.length,
          }, blended(inks.lines[n], inks.ground, 0.1 + 0.6 * p)));
        });
        shown.forEach((each, n) => each.forEach(({ query, key, p }) => {
          const shifted = ({ x, y, height }: Spot) => ({ x: x + left, y: y + top, height });
          if (query !== key) surface.curve(curve(shifted(spot(query)!), shifted(spot(key)!), n), inks.lines[n], 0.8 + 3.5 * p, 0.25 + 0.75 * Math.min(1, p));
        }));
        chips.forEach(({ x, y, width, text }, n) => {
          if (start + n === kept) surface.frame({ x: left + x, y: top + y + legend, width, height: TALL }, inks.ink, 1.5);
          surface.text(text, left + x + width / 2, top + y + legend + TALL / 2, { fill: inks.ink, anchor: "middle", size: SIZE });
        });
      },
    },
    bar: null,
  };
}

/** So much of a colour over another one; both as #rrggbb. */
function blended(over: string, under: string, share: number): string {
  const part = (of: string, n: number) => parseInt(of.slice(1 + 2 * n, 3 + 2 * n), 16);
  return `#${[0, 1, 2].map((n) => Math.round(share * part(over, n) + (1 - share) * part(under, n)).toString(16).padStart(2, "0")).join("")}`;
}
