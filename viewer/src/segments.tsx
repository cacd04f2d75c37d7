// How much weight flows between the named segments of the input: for one head as a table, for all heads as a picture.

import { useRef } from "preact/hooks";
import { data, type Layer } from "./data";
import { all, type Place } from "./grid";
import { colour } from "./field";
import { useRoving } from "./roving";
import type { State } from "./state";
import { NO_VALUE, percent, segments as texts, whole } from "./texts";
import { layerName, nameOf } from "./words";

const NONE = 0xffff;
const LISTED = 10;

const decoded = new Map<number, Uint16Array>();

/** The share of the weight of the rows of a segment that is on keys of a segment, as a mean; null where there are no such rows. */
function share(layer: Layer, head: number, from: number, to: number): number | null {
  const size = layer.segments!.names.length;
  let codes = decoded.get(layer.index);
  if (!codes) {
    const bytes = Uint8Array.from(atob(layer.segments!.mean), (each) => each.charCodeAt(0));
    decoded.set(layer.index, (codes = new Uint16Array(bytes.buffer)));
  }
  const code = codes[(head * size + from) * size + to];
  return code === NONE ? null : code / (NONE - 1);
}

const FIRST_LAYER = data.layers.find((layer) => layer.segments !== null);

function cell(value: number | null, colours: State["colours"]) {
  if (value === null) return {};
  const { fill, white } = colour(value, colours);
  return { background: fill, color: white ? "white" : "black" };
}

/** The table of one head: a row for the segment of the queries, a column for that of the keys. */
export function SegmentTable({ layer, head, colours }: { layer: Layer; head: number; colours: State["colours"] }) {
  if (!layer.segments) return null;
  const { names } = layer.segments;
  return (
    <div class="segments">
      <h3>{texts.title}</h3>
      <div class="scroll" tabIndex={0} role="region" aria-label={texts.tableOf(nameOf(layer.index, head))}>
        <table>
          <thead><tr><th scope="col">{texts.corner}</th>{names.map((name, to) => <th scope="col" key={to}><bdi>{name}</bdi></th>)}</tr></thead>
          <tbody>
            {names.map((name, from) => (
              <tr key={from}>
                <th scope="row"><bdi>{name}</bdi></th>
                {names.map((_, to) => {
                  const value = share(layer, head, from, to);
                  return <td key={to} style={cell(value, colours)}>{value === null ? NO_VALUE : percent(value)}</td>;
                })}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <p class="hint">{texts.hint}</p>
    </div>
  );
}

interface Props {
  state: State;
  change: (part: Partial<State>) => void;
  open: (place: Place) => void;
}

/** Every head, coloured by the share that flows from one segment to another. */
export function SegmentView({ state, change, open }: Props) {
  const { names } = FIRST_LAYER!.segments!;
  const [from, to] = [Math.min(state.segmentFrom ?? names.length - 1, names.length - 1), Math.min(state.segmentTo, names.length - 1)];
  const places = all().filter(({ layer }) => sameNames(data.layers[layer], names));
  const value = ({ layer, head }: Place) => share(data.layers[layer], head, from, to);
  const best = places.map((place) => ({ place, value: value(place) })).filter((each) => each.value !== null).sort((a, b) => b.value! - a.value!).slice(0, LISTED);
  const table = useRef<HTMLTableElement>(null);
  const roving = useRoving(table, "button");
  const picker = (label: string, at: number, choose: (at: number) => void) => (
    <label>{label}{" "}
      <select value={at} onChange={(event) => choose(Number(event.currentTarget.value))}>
        {names.map((name, n) => <option key={n} value={n}>{name}</option>)}
      </select>
    </label>
  );
  return (
    <section aria-labelledby="segments-title">
      <h2 id="segments-title">{texts.title}</h2>
      <p class="switches">
        {picker(texts.from, from, (at) => change({ segmentFrom: at }))}
        {picker(texts.to, to, (at) => change({ segmentTo: at }))}
      </p>
      <p class="hint">{texts.viewHint}</p>
      <div class="segment-columns">
        <div class="scroll" tabIndex={0} role="region" aria-label={texts.allHeads}>
          <table class="segment-heads" ref={table} {...roving}>
            <thead>
              <tr>
                <th scope="col">{texts.layerAndHead}</th>
                {Array.from({ length: Math.max(...places.map(({ head }) => head)) + 1 }, (_, head) => <th scope="col" key={head}>{head}</th>)}
              </tr>
            </thead>
            <tbody>
              {data.layers.map((layer) => sameNames(layer, names) && (
                <tr key={layer.index}>
                  <th scope="row">{layerName(layer.index)}</th>
                  {Array.from({ length: layer.heads }, (_, head) => {
                    const p = value({ layer: layer.index, head });
                    const text = p === null ? NO_VALUE : percent(p);
                    return (
                      <td key={head}>
                        <button type="button" style={cell(p, state.colours)} aria-label={texts.cell(nameOf(layer.index, head), text)} onClick={() => open({ layer: layer.index, head })}>{text}</button>
                      </td>
                    );
                  })}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
        <div>
          <h3>{texts.most(names[from], names[to])}</h3>
          <ol class="ranks">
            {best.map(({ place, value: p }) => (
              <li key={`${place.layer}.${place.head}`}>
                <button type="button" onClick={() => open(place)}>{nameOf(place.layer, place.head)}</button>
                <span class="meter" aria-hidden="true"><i style={{ width: `${100 * p!}%` }} /></span>
                <span>{percent(p!)}</span>
              </li>
            ))}
          </ol>
          <p class="hint">{texts.rows(whole(Math.max(...places.map(({ layer, head }) => data.layers[layer].segments!.rows[head][from]))), names[from])}</p>
        </div>
      </div>
    </section>
  );
}

function sameNames(layer: Layer, names: string[]): boolean {
  return layer.segments !== null && layer.segments.names.join("\n") === names.join("\n");
}
