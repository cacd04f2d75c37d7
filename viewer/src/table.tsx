// Every head with its means, sortable by any column, and as CSV.

import { data } from "./data";
import { chosen, type Place } from "./grid";
import { save } from "./map";
import type { State } from "./state";
import { figure, nameOf, statistic } from "./words";

interface Props {
  state: State;
  change: (part: Partial<State>) => void;
  open: (place: Place) => void;
}

/** A field of CSV: quoted where it has to be, and never read as a formula by a spreadsheet. */
function quoted(text: string): string {
  const safe = /^[=+\-@\t\r]/.test(text) && !Number.isFinite(Number(text)) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

/** All figures of these heads in full, one line a head. */
export function csv(places: Place[]): string {
  const heading = ["layer", "head", "rows", "pattern", "score", ...data.names.map((each) => each.name)];
  const lines = places.map(({ layer, head }) => {
    const best = data.patterns[layer]?.[head]?.[0];
    const means = data.names.map(({ name }) => statistic(layer, head, name));
    return [data.layers[layer].name, head, data.layers[layer].rows[head], best?.[0], best?.[1], ...means];
  });
  return [heading, ...lines].map((line) => line.map((each) => quoted(String(each ?? ""))).join(",") + "\r\n").join("");
}

/** What figures mean, for those who cannot point at a heading. */
export function Meanings({ names }: { names: { heading: string; meaning: string }[] }) {
  return (
    <details class="meanings">
      <summary>What each figure means</summary>
      <dl>{names.filter(({ meaning }) => meaning).map(({ heading, meaning }) => <div key={heading}><dt>{heading}</dt><dd>{meaning}</dd></div>)}</dl>
    </details>
  );
}

export function Table({ state, change, open }: Props) {
  const places = chosen(state);
  const columns = [{ name: "score", heading: "score", meaning: "of the best pattern: 1 is exactly so, 0 no closer than chance" }, ...data.names];
  const sort = (name: string) => change(state.sort === name ? { down: !state.down } : { sort: name, down: true });
  const arrow = (name: string) => (state.sort === name ? (state.down ? " ↓" : " ↑") : "");
  const order = (name: string) => (state.sort === name ? (state.down ? "descending" : "ascending") : "none");
  return (
    <section aria-labelledby="table-title">
      <h2 id="table-title">Figures of every head</h2>
      <p class="hint">Means over the rows that have the quantity; entropies in nats. A click on a heading sorts.{" "}
        <button type="button" onClick={() => save("headscope-figures.csv", new Blob([csv(places)], { type: "text/csv" }))}>CSV</button>
      </p>
      <Meanings names={columns} />
      <div class="scroll" tabIndex={0} role="region" aria-labelledby="table-title">
        <table class="every">
          <thead>
            <tr>
              <th scope="col" aria-sort={state.sort ? "none" : "ascending"}>
                <button type="button" onClick={() => change({ sort: "" })}>head</button>
              </th>
              <th scope="col" class="text">pattern</th>
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
                <td class="text">{data.patterns[place.layer]?.[place.head]?.[0]?.[0] ?? "–"}</td>
                {columns.map(({ name }) => <td key={name}>{figure(statistic(place.layer, place.head, name))}</td>)}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}
