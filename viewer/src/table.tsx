// Every head with its means, sortable by any column, and as CSV.

import { useRef } from "preact/hooks";
import { data } from "./data";
import { Term } from "./glossary";
import { all, chosen, isWeak, type Place, spanOf } from "./grid";
import { save } from "./map";
import { NAMED, nameInWords, secondName } from "./naming";
import { useRoving } from "./roving";
import type { State } from "./state";
import { figure, files, head as headTexts, NO_VALUE, table } from "./texts";
import { nameOf, statistic } from "./words";

interface Props {
  state: State;
  change: (part: Partial<State>) => void;
  open: (place: Place) => void;
}

/** A field of CSV: quoted where necessary, and never a formula to a spreadsheet. */
function quoted(text: string): string {
  const safe = /^[=+\-@\t\r]/.test(text) && !Number.isFinite(Number(text)) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

/** The columns of the table: what some head has a value of. */
const filled = (name: string) => all().some(({ layer, head }) => statistic(layer, head, name) !== null);
const FILLED = data.names.filter(({ name }) => filled(name));
const HAS_SCORE = filled("score");

/** The tint of a cell: where its value is between the least and the most of its column. */
function tint(value: number | null, name: string): { background: string } | undefined {
  const [least, most] = spanOf(name);
  return value === null || most <= least ? undefined : { background: `color-mix(in srgb, var(--profile) ${Math.round((40 * (value - least)) / (most - least))}%, transparent)` };
}

/** All statistics of these heads in full, one line per head. */
export function csv(places: Place[]): string {
  const heading = ["layer", "head", "rows", "pattern", "score", ...data.names.map((each) => each.name)];
  const lines = places.map(({ layer, head }) => {
    const best = data.patterns[layer]?.[head]?.[0];
    const means = data.names.map(({ name }) => statistic(layer, head, name));
    return [data.layers[layer].name, head, data.layers[layer].rows[head], best?.[0], best?.[1], ...means];
  });
  return csvLines([heading, ...lines]);
}

export function csvLines(lines: unknown[][]): string {
  return lines.map((line) => line.map((each) => quoted(String(each ?? ""))).join(",") + "\r\n").join("");
}

/** What the statistics mean, for readers who cannot hover over a heading. */
export function Meanings({ names }: { names: { heading: string; meaning: string }[] }) {
  return (
    <details class="meanings">
      <summary>{headTexts.meanings}</summary>
      <dl>{names.filter(({ meaning }) => meaning).map(({ heading, meaning }) => <div key={heading}><dt>{heading}</dt><dd>{meaning}</dd></div>)}</dl>
    </details>
  );
}

/** The name of the pattern of a head, from the score on from which captions name it. */
function patternOf({ layer, head }: Place): string | null {
  const best = data.patterns[layer]?.[head]?.[0];
  return best && best[1] >= NAMED ? best[0] : null;
}

/** The pattern as the page and the file of the table write it. */
function nameOfPattern(place: Place): string {
  const name = patternOf(place);
  if (name === null) return NO_VALUE;
  return [nameInWords(name, data.patterns[place.layer][place.head][0][1]), secondName(place)].filter(Boolean).join(" · ");
}

export function Table({ state, change, open }: Props) {
  const places = chosen(state);
  const frame = useRef<HTMLTableElement>(null);
  const roving = useRoving(frame, "tbody button");
  const columns = [...(HAS_SCORE ? [{ name: "score", heading: table.score, meaning: table.scoreMeaning }] : []), ...FILLED];
  const sort = (name: string) => change(state.sort === name ? { down: !state.down } : { sort: name, down: true });
  const arrow = (name: string) => (state.sort === name ? (state.down ? " ↓" : " ↑") : "");
  const order = (name: string) => (state.sort === name ? (state.down ? "descending" : "ascending") : "none");
  return (
    <section aria-labelledby="table-title">
      <h2 id="table-title">{table.title}</h2>
      <p class="hint">{table.hint}{" "}
        <button type="button" onClick={() => save("headscope-figures.csv", new Blob([csv(places)], { type: "text/csv" }))}>{files.csv}</button>
      </p>
      <Meanings names={columns} />
      <div class="scroll" tabIndex={0} role="group" aria-labelledby="table-title">
        <table class="every" ref={frame} {...roving}>
          <thead>
            <tr>
              <th scope="col" aria-sort={state.sort ? "none" : "ascending"}>
                <button type="button" onClick={() => change({ sort: "" })}>{table.head}</button>
              </th>
              <th scope="col" class="text">{table.pattern}</th>
              {columns.map(({ name, heading, meaning }) => (
                <th scope="col" key={name} aria-sort={order(name)}>
                  <button type="button" title={meaning} onClick={() => sort(name)}>{heading}{arrow(name)}</button>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {places.map((place) => (
              <tr key={`${place.layer}.${place.head}`}>
                <th scope="row"><button type="button" onClick={() => open(place)}>{nameOf(place.layer, place.head)}</button></th>
                <td class={`text${isWeak(place) ? " dim" : ""}`}><Term name={patternOf(place) ?? ""}>{nameOfPattern(place)}</Term></td>
                {columns.map(({ name }) => {
                  const value = statistic(place.layer, place.head, name);
                  return <td key={name} style={tint(value, name)}>{figure(value)}</td>;
                })}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}
