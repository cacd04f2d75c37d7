// One box that finds heads, positions and tokens.

import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { binOf, data, HAS_READING, onOtherData, token } from "./data";
import { all, type Place } from "./grid";
import { opened } from "./head";
import { isCausal, isScored, NAMED, namesOf } from "./naming";
import { selected } from "./selection";
import type { State } from "./state";
import { figure, history, names, patternNames, percent, search as texts, whole } from "./texts";
import { binAt, HAS_WINDOWS, nameOf, statistic } from "./words";

const SHOWN = 8;
const UNFOLDED = 50; // further ones at a time
const CONTEXT = 2; // tokens before and after a token that fits

interface Hit {
  text: string;
  to: Partial<State>;
}

/** The heads, positions and tokens that fit what was typed; a hit is made when it is shown. */
function hitsOf(typed: string, state: State): (() => Hit)[] {
  const text = typed.trim();
  if (text === "") return [];
  const hits: (() => Hit)[] = [];
  const point = /^(\d+)\.(\d+)$/.exec(text);
  for (const { layer, head } of all()) {
    const name = nameOf(layer, head);
    if (point ? layer === +point[1] && head === +point[2] : name.toLowerCase() === text.toLowerCase()) {
      hits.push(() => ({ text: name, to: data.history ? { layer, head } : { view: "head", ...opened(state, layer, head) } }));
    }
  }
  const [called, begun] = patternsOf(text);
  for (const name of called) hits.push(...patternHit(name));
  const found = indexed();
  if (/^\d[\d,]*$/.test(text)) {
    const at = Number(text.replaceAll(",", ""));
    if (at < found.ends.length) hits.push(() => hitAt(at, state));
  }
  const step = data.history?.steps.indexOf(Number(text.replace(/^step\s*/i, "").replaceAll(",", "") || NaN)) ?? -1;
  if (step >= 0) hits.push(() => ({ text: history.step(data.history!.steps[step]), to: { moment: step } }));
  for (const at of startsOf(text.toLowerCase(), found)) hits.push(() => hitAt(at, state));
  return hits.length > 0 ? hits : begun.flatMap(patternHit);
}

const LETTERS = 3; // of the name of a pattern, at least

/** The patterns whose name was typed, in the language of the page or in English; and those of which it is the beginning. */
function patternsOf(typed: string): [string[], string[]] {
  if (data.history || data.image || !isScored()) return [[], []];
  const text = typed.toLowerCase();
  const names = Object.entries(patternNames).map(([name, shown]) => [name, [name, shown.toLowerCase()]] as const);
  return [
    names.filter(([, called]) => called.includes(text)).map(([name]) => name),
    names.filter(([, called]) => text.length >= LETTERS && called.some((each) => each.startsWith(text))).map(([name]) => name),
  ];
}

/** The heads that are named by a pattern; where there are none, the head with the largest mean weight on its keys. */
function patternHit(name: string): (() => Hit)[] {
  const shown = patternNames[name];
  const scoreOf = (place: Place) => namesOf(place).find(([each, score]) => each === name && score >= NAMED)?.[1] ?? -1;
  const named = all().filter((place) => scoreOf(place) >= 0).sort((a, b) => scoreOf(b) - scoreOf(a));
  if (named.length > 0) {
    const text = texts.pattern(shown, named.length, pointed(named[0]), percent(scoreOf(named[0])));
    return [() => ({ text, to: { view: "heads", pattern: name, by: "score", least: NAMED, under: false } })];
  }
  const mean = (place: Place) => statistic(place.layer, place.head, name) ?? -1;
  const [best] = data.names.some((each) => each.name === name) ? all().sort((a, b) => mean(b) - mean(a)) : [];
  if (!best || mean(best) < 0) return [];
  const leads = [pointed(best), figure(mean(best), 2)] as const;
  const few = data.few?.[name];
  const text = few ? `${texts.unscored(shown, few.rows, few.of, few.needs, isCausal())} ${texts.leads(...leads)}` : texts.unnamed(shown, ...leads);
  return [() => ({ text, to: { view: "table", sort: name, down: true } })];
}

/** "3.3". */
function pointed({ layer, head }: Place): string {
  const { short } = data.layers[layer];
  return /^\d+$/.test(short) ? `${short}.${head}` : nameOf(layer, head);
}

/** A token, in the text or in a window of it. */
function hitAt(at: number, state: State): Hit {
  if (data.tokens) return { text: texts.token(at, around(at, 0, data.tokens.labels.length, (n) => token(n) ?? "")), to: goTo(at, state) };
  const { labels, ids } = data.runTokens!;
  let [run, before] = [0, 0];
  while (at >= before + ids[run].length) before += ids[run++].length;
  const position = at - before;
  return { text: texts.inWindow(run, position, around(position, 0, ids[run].length, (n) => labels[ids[run][n]])), to: toBin(run, position, ids[run].length, state) };
}

const SPACE = "␣"; // as labels show it

interface Index {
  text: string; // of all tokens
  ends: Uint32Array; // where each token ends
}

let index: Index | null = null;
onOtherData(() => (index = null));

/** The text, or the texts of all windows, made once: it may have a million tokens. */
function indexed(): Index {
  if (index) return index;
  const plain = (label: string) => label.replaceAll(SPACE, " ").toLowerCase();
  const pieces: string[] = data.tokens
    ? data.tokens.labels.map((label, at) => plain(data.tokens!.longer[at] ?? label))
    : (data.runTokens?.ids ?? []).flatMap((ids) => ids.map((id, n) => plain(data.runTokens!.labels[id]) + (n === ids.length - 1 ? "\n" : "")));
  const ends = new Uint32Array(pieces.length);
  let end = 0;
  pieces.forEach((piece, n) => (ends[n] = end += piece.length));
  return (index = { text: pieces.join(""), ends });
}

/** The tokens in which a text begins: it may go over several, as words do. */
function startsOf(wanted: string, { text, ends }: Index): number[] {
  const found: number[] = [];
  let token = 0;
  for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + 1)) {
    while (at >= ends[token]) token++;
    if (found[found.length - 1] !== token) found.push(token);
  }
  return found;
}

/** A token, with those around it. */
function around(at: number, first: number, stop: number, text: (at: number) => string): string {
  const labels = Array.from({ length: 2 * CONTEXT + 1 }, (_, n) => at + n - CONTEXT).filter((n) => n >= first && n < stop);
  return labels.map((n) => (n === at ? names.inQuotes(text(n)) : text(n))).join(" ").trim();
}

/** A token is shown where the text is: in the reading view if there is one, else in the map of the head. */
function goTo(at: number, state: State): Partial<State> {
  return { ...selected(at, state), view: state.view === "head" ? "head" : HAS_READING ? "reading" : "head" };
}

/** A position in a window is shown in its text where the page can: the map of a head merges all windows. */
function toBin(run: number, at: number, length: number, state: State): Partial<State> {
  const layer = data.layers[state.layer];
  const share = (bins: number | undefined) => (bins ? binOf(at, bins, length) : null); // where windows have different lengths
  const text = { window: run, token: at, page: null };
  if (HAS_WINDOWS) return { ...text, view: "reading" };
  return { ...text, view: "head", row: binAt(layer, "query", at) ?? share(layer.map?.rows), column: binAt(layer, "key", at) ?? share(layer.map?.columns) };
}

const hasText = data.tokens !== null || data.runTokens !== null;

const MOST_LETTERS = 6; // of the word in the placeholder

/** What the placeholder offers: a word, a position and a head that this page has. */
const EXAMPLES = ((): [string, string, string] => {
  const labels = data.tokens?.labels ?? data.runTokens?.labels ?? [];
  // the first token of a word has a space before it with most tokenizers
  const [first, any] = [`^${SPACE}`, "^"].map((start) => labels.slice(0, 200).find((label) => new RegExp(`${start}[a-z]{3,${MOST_LETTERS}}$`).test(label))?.replace(SPACE, ""));
  const count = data.tokens?.labels.length ?? data.runTokens?.ids.reduce((sum, ids) => sum + ids.length, 0) ?? 0;
  const layer = Math.min(3, data.layers.length - 1);
  return [first ?? any ?? "", whole(Math.min(count - 1, Math.floor((count * 2) / 3))), `${layer}.${Math.min(3, data.layers[layer].heads - 1)}`];
})();

/** Why nothing fits; of a number, how long the text is. */
function notFound(typed: string): string {
  if (data.history) return texts.none;
  const [name] = patternsOf(typed.trim())[1];
  if (name) return texts.never(patternNames[name]);
  if (!hasText) return texts.noTokens;
  return /^\d[\d,]*$/.test(typed.trim()) ? texts.beyond(indexed().ends.length) : texts.none;
}

interface Props {
  state: State;
  change: (part: Partial<State>) => void;
}

export function Search({ state, change }: Props) {
  const [typed, setTyped] = useState("");
  const [open, setOpen] = useState(false);
  const [at, setAt] = useState(0);
  const input = useRef<HTMLInputElement>(null);
  useLayoutEffect(() => { // at once: an effect would miss a key before the first frame
    const pressed = (event: KeyboardEvent) => {
      if (event.key !== "/" || /^(INPUT|SELECT|TEXTAREA)$/.test((event.target as HTMLElement).tagName)) return;
      event.preventDefault();
      input.current!.focus();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
  const [chosen, setChosen] = useState<number | null>(null); // the hit that was chosen last
  const every = useMemo(() => hitsOf(typed, state), [typed, state]);
  const [listed, setListed] = useState(SHOWN);
  const hits = open ? every.slice(0, listed).map((hit) => hit()) : [];
  const more = every.length > hits.length;
  const merged = !data.tokens && data.runTokens !== null && !HAS_WINDOWS;
  useLayoutEffect(() => void (open && document.getElementById(`hit-${at}`)?.scrollIntoView({ block: "nearest" })), [at, listed]);
  const choose = (n: number) => {
    if (n >= every.length) return;
    if (open && n === hits.length) return setListed(listed + UNFOLDED);
    setOpen(false);
    setChosen(n);
    change(every[n]().to);
  };
  const pressed = (event: KeyboardEvent) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by) setAt((before) => Math.max(0, Math.min(hits.length - (more ? 0 : 1), before + by)));
    else if (event.key === "Enter") choose(open || chosen === null ? at : (chosen + 1) % every.length);
    else if (event.key === "Escape") setOpen(false);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return (
    <div class="search" role="search" onKeyDown={pressed}>
      <input ref={input} type="text" aria-label={texts.label} placeholder={data.history ? texts.steps : hasText ? texts.placeholder(...EXAMPLES) : texts.onlyHeads} value={typed} role="combobox" aria-expanded={hits.length > 0} aria-controls="found" aria-autocomplete="list" {...(hits.length > 0 ? { "aria-activedescendant": `hit-${at}` } : {})}
        onInput={(event) => { setTyped(event.currentTarget.value); setAt(0); setListed(SHOWN); setChosen(null); setOpen(true); }} onFocus={() => setOpen(true)} onBlur={() => setTimeout(() => { setOpen(false); setChosen(null); }, 150)} />
      <ul id="found" role="listbox" aria-label={texts.results} hidden={hits.length === 0}>
        {hits.map((hit, n) => (
          <li key={n} id={`hit-${n}`} role="option" aria-selected={n === at} onMouseDown={(event) => event.preventDefault()} onClick={() => choose(n)}><bdi>{hit.text}</bdi></li>
        ))}
        {open && more && <li id={`hit-${hits.length}`} role="option" class="hint" aria-selected={at === hits.length} onMouseDown={(event) => event.preventDefault()} onClick={() => choose(hits.length)}>{texts.more(every.length - hits.length)}</li>}
      </ul>
      {open && typed.trim() !== "" && every.length === 0 && <span class="hint none" role="status">{notFound(typed)}</span>}
      {!open && chosen !== null && (every.length > 1 || merged) && <span class="hint none nth" role="status">{every.length > 1 && texts.nth(chosen + 1, every.length)} <bdi>{every[chosen]?.().text}</bdi> {merged && texts.merged}</span>}
    </div>
  );
}
