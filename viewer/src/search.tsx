// One box that finds heads, positions and tokens.

import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { data, HAS_READING, token } from "./data";
import { all } from "./grid";
import { opened, selected } from "./head";
import type { State } from "./state";
import { names, search as texts } from "./texts";
import { nameOf } from "./words";

const SHOWN = 8;
const CONTEXT = 2; // tokens before and after a token that fits

interface Hit {
  text: string;
  to: Partial<State>;
}

/** The heads, positions and tokens that fit what was typed; the number of all that fit. */
function hitsOf(typed: string, state: State): { hits: Hit[]; count: number } {
  const text = typed.trim();
  if (text === "") return { hits: [], count: 0 };
  const hits: Hit[] = [];
  const length = data.tokens?.labels.length ?? 0;
  const point = /^(\d+)\.(\d+)$/.exec(text);
  for (const { layer, head } of all()) {
    const name = nameOf(layer, head);
    if (point ? layer === +point[1] && head === +point[2] : name.toLowerCase() === text.toLowerCase()) {
      hits.push({ text: name, to: { view: "head", ...opened(state, layer, head) } });
    }
  }
  if (/^\d[\d,]*$/.test(text)) {
    const at = Number(text.replaceAll(",", ""));
    if (at < length) hits.push({ text: texts.token(at, around(at)), to: goTo(at, state) });
  }
  let count = hits.length;
  for (const at of startsOf(text.toLowerCase())) {
    count++;
    if (hits.length < SHOWN) hits.push({ text: texts.token(at, around(at)), to: goTo(at, state) });
  }
  return { hits, count };
}

const SPACE = "␣"; // as labels show it

/** The tokens in which a text begins: it may go over several, as words do. */
function startsOf(wanted: string): number[] {
  const tokens = data.tokens?.labels.map((label, at) => (data.tokens!.longer[at] ?? label).replaceAll(SPACE, " ").toLowerCase()) ?? [];
  const whole = tokens.join("");
  const found = new Set<number>();
  let [token, end] = [0, tokens[0]?.length ?? 0]; // the token at a place, and where it ends
  for (let at = whole.indexOf(wanted); at >= 0; at = whole.indexOf(wanted, at + 1)) {
    while (at >= end) end += tokens[++token].length;
    found.add(token);
  }
  return [...found];
}

/** A token, with those around it. */
function around(at: number): string {
  const labels = Array.from({ length: 2 * CONTEXT + 1 }, (_, n) => (n === CONTEXT ? names.inQuotes(token(at) ?? "") : (token(at + n - CONTEXT) ?? "")));
  return labels.join(" ").trim();
}

/** A token is shown where the text is: in the reading view if there is one, else in the map of the head. */
function goTo(at: number, state: State): Partial<State> {
  return { ...selected(at, state), view: state.view === "head" ? "head" : HAS_READING ? "reading" : "head" };
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
  const { hits, count } = open ? hitsOf(typed, state) : { hits: [], count: 0 };
  const choose = (hit: Hit | undefined) => {
    if (!hit) return;
    setOpen(false);
    change(hit.to);
  };
  const pressed = (event: KeyboardEvent) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by) setAt((before) => Math.max(0, Math.min(hits.length - 1, before + by)));
    else if (event.key === "Enter") choose(hits[at]);
    else if (event.key === "Escape") setOpen(false);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return (
    <div class="search" role="search" onKeyDown={pressed}>
      <input ref={input} type="text" aria-label={texts.label} placeholder={data.tokens ? texts.placeholder : texts.onlyHeads} value={typed} role="combobox" aria-expanded={hits.length > 0} aria-controls="found" aria-autocomplete="list" {...(hits.length > 0 ? { "aria-activedescendant": `hit-${at}` } : {})}
        onInput={(event) => { setTyped(event.currentTarget.value); setAt(0); setOpen(true); }} onFocus={() => setOpen(true)} onBlur={() => setTimeout(() => setOpen(false), 150)} />
      <ul id="found" role="listbox" aria-label={texts.results} hidden={hits.length === 0}>
        {hits.map((hit, n) => (
          <li key={n} id={`hit-${n}`} role="option" aria-selected={n === at} onMouseDown={(event) => event.preventDefault()} onClick={() => choose(hit)}><bdi>{hit.text}</bdi></li>
        ))}
        {count > hits.length && <li class="hint" aria-disabled="true">{texts.more(count - hits.length)}</li>}
      </ul>
      {open && typed.trim() !== "" && count === 0 && <span class="hint none" role="status">{data.tokens ? texts.none : texts.noTokens}</span>}
    </div>
  );
}
