// The glossary: a schematic map and a sentence for each pattern, the statistics with their units, and the words of the field.

import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { data } from "./data";
import { glossary as texts, help, patternNames } from "./texts";

const SIDE = 8; // tokens of a picture
const CELL = 10;

type Weight = (query: number, key: number) => number;

/** The weight of a query on a key, from 0 to 1. */
const WEIGHTS: Record<string, Weight> = {
  previous: (i, j) => Number(j === i - 1),
  next: (i, j) => Number(j === i + 1),
  self: (i, j) => Number(j === i),
  duplicate: (i, j) => Number(j === i - SIDE / 2),
  induction: (i, j) => Number(i >= SIDE / 2 && j === i - SIDE / 2 + 1),
  "fixed key": (i, j) => Number(j === 3 && i >= j),
  first: (_, j) => Number(j === 0),
  local: (i, j) => (j <= i && i - j <= 3 ? 1 / Math.min(i + 1, 4) : 0),
  uniform: (i, j) => (j <= i ? 1 / (i + 1) : 0),
};
const AHEAD = ["next"]; // not causal
const WITH_LETTERS = ["duplicate", "induction"];
const LETTERS = "ABCDABCD";
const STATISTICS: { name: string; heading: string; meaning: string }[] = data.history?.quantities ?? data.names;

/** The schematic map of a pattern. */
function Picture({ name }: { name: string }) {
  const letters = WITH_LETTERS.includes(name);
  const edge = letters ? CELL : 0;
  const size = SIDE * CELL + edge;
  const cells = Array.from({ length: SIDE * SIDE }, (_, n) => [Math.floor(n / SIDE), n % SIDE]);
  const label = texts.picture(patternNames[name], texts.entries[name]) + (letters ? ` ${texts.example(LETTERS)}` : "");
  return (
    <svg class="schema" role="img" aria-label={label} viewBox={`-1 -1 ${size + 2} ${size + 2}`} width="96" height="96">
      {letters && Array.from(LETTERS, (letter, n) => (
        <g key={n} aria-hidden="true">
          <text x={edge + (n + 0.5) * CELL} y={CELL - 2.5}>{letter}</text>
          <text x={CELL / 2} y={edge + (n + 0.5) * CELL + 2.5}>{letter}</text>
        </g>
      ))}
      {cells.map(([i, j]) => {
        const weight = WEIGHTS[name](i, j);
        const masked = j > i && !AHEAD.includes(name);
        return <rect key={`${i}.${j}`} class={weight > 0 ? "on" : masked ? "masked" : "off"} x={edge + j * CELL} y={edge + i * CELL} width={CELL - 1} height={CELL - 1} {...(weight > 0 ? { style: { opacity: 0.3 + 0.7 * weight } } : {})} />;
      })}
    </svg>
  );
}

let show: (entry: string) => void = () => undefined;

/** Open the glossary, at an entry: the name of a pattern or of a statistic, or "". */
export function openGlossary(entry = ""): void {
  show(entry);
}

/** A name that opens its entry of the glossary. */
export function Term({ name, children }: { name: string; children: ComponentChildren }) {
  if (!(name in WEIGHTS) && !STATISTICS.some((each) => each.name === name)) return <>{children}</>;
  return <button type="button" class="term" aria-haspopup="dialog" onClick={() => openGlossary(name)}>{children}</button>;
}

/** The dialog; it is in the page once. */
export function Glossary() {
  const dialog = useRef<HTMLDialogElement>(null);
  const [entry, setEntry] = useState<{ name: string } | null>(null);
  show = (name) => setEntry({ name });
  useLayoutEffect(() => {
    const element = dialog.current;
    if (!element || !entry) return;
    if (!element.open) element.showModal();
    const place = entry.name ? element.querySelector<HTMLElement>(`[data-entry="${CSS.escape(entry.name)}"]`) : null;
    (place ?? element.querySelector<HTMLElement>("h2"))!.focus();
    place?.scrollIntoView({ block: "center" });
  }, [entry]);
  if (!entry) return null;
  const close = () => dialog.current!.close();
  return (
    <dialog ref={dialog} class="glossary" aria-labelledby="glossary-title" onClose={() => setEntry(null)} onKeyDown={(event) => event.stopPropagation()}
      onClick={(event) => event.target === dialog.current && close()}>
      <div class="inside">
        <div class="head">
          <h2 id="glossary-title" tabIndex={-1}>{texts.title}</h2>
          <button type="button" class="close" aria-label={help.close} title={help.close} onClick={close}>×</button>
        </div>
        <h3>{texts.patterns}</h3>
        <p class="hint">{texts.hint}</p>
        <ul class="entries">
          {Object.keys(WEIGHTS).map((name) => (
            <li key={name} data-entry={name} tabIndex={-1} class={name === entry.name ? "chosen" : ""}>
              <Picture name={name} />
              <p><b>{patternNames[name]}</b><br />{texts.entries[name]}</p>
            </li>
          ))}
        </ul>
        <h3>{texts.words}</h3>
        <dl>{Object.entries(texts.terms).map(([name, [word, meaning]]) => <div key={name}><dt>{word}</dt><dd>{meaning}</dd></div>)}</dl>
        <h3>{texts.statistics}</h3>
        <dl>
          {STATISTICS.filter(({ meaning }) => meaning).map(({ name, heading, meaning }) => {
            const unit = texts.units[name];
            // a statistic with the name of a pattern is reached by that
            return <div key={name} {...(name in WEIGHTS ? {} : { "data-entry": name, tabIndex: -1 })} class={name === entry.name ? "chosen" : ""}><dt>{heading}</dt><dd>{meaning} {unit && <small>{texts.unit(unit)}</small>}</dd></div>;
          })}
          <div><dt>{texts.received[0]}</dt><dd>{texts.received[1]} <small>{texts.unit(texts.units.max_weight)}</small></dd></div>
        </dl>
      </div>
    </dialog>
  );
}
