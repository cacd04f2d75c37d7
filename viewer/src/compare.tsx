// Two heads side by side, at one zoom, and their difference.

import { useMemo } from "preact/hooks";
import { data } from "./data";
import { difference, field, onOneScale } from "./field";
import { Term } from "./glossary";
import { all, bestPattern } from "./grid";
import { alike, Legend, NoMap, opened, useHead, useShown } from "./head";
import { MapView, type Zoom } from "./map";
import type { State } from "./state";
import { Meanings } from "./table";
import { changes, compare, figure, NO_VALUE, withSign } from "./texts";
import { nameOf, statistic } from "./words";

interface Props {
  state: State;
  theme: string;
  change: (part: Partial<State>) => void;
}

export function Compare({ state: asked, theme, change: changed }: Props) {
  const { state, heads: [a, b], change } = useShown(asked, [useHead(asked.layer, asked.head), useHead(asked.otherLayer, asked.otherHead)], changed);
  const [layerA, layerB] = [data.layers[state.layer], data.layers[state.otherLayer]];
  const ownA = useMemo(() => (a?.map ? field(a.map, state.pool, state.sink, layerA.map!.exact) : null), [a, state.pool, state.sink]);
  const ownB = useMemo(() => (b?.map ? field(b.map, state.pool, state.sink, layerB.map!.exact) : null), [b, state.pool, state.sink]);
  const [fieldA, fieldB] = useMemo(() => onOneScale(ownA, ownB), [ownA, ownB]);
  const less = useMemo(() => (ownA && ownB ? difference(ownB, ownA) : null), [ownA, ownB]);
  const zoom: Zoom = useMemo(() => ({ at: state.zoom, change: (at) => change({ zoom: at }) }), [state.zoom, change]);
  const pin = (row: number | null, column: number | null) => change({ row, column });
  const unpinned = alike(layerA, layerB) ? {} : { pin: () => undefined, row: null, column: null }; // the selection is a bin of head A
  const [nameA, nameB] = [nameOf(state.layer, state.head), nameOf(state.otherLayer, state.otherHead)];
  const file = `headscope-${state.layer}.${state.head}-and-${state.otherLayer}.${state.otherHead}`;
  const room = Math.max(320, innerHeight - 180); // so that the maps fit the window
  const rest = { scale: state.scale, colours: state.colours, zoom, theme, pin, row: state.row, column: state.column, most: 900, room };
  return (
    <section aria-labelledby="compare-title">
      <h2 id="compare-title">{compare.title}</h2>
      {!layerA.map && !layerB.map ? <NoMap /> : <p class="hint">{changes.scales}</p>}
      <div class="pair">
        <div>
          <Choice label={compare.a} layer={asked.layer} head={asked.head} choose={(layer, head) => changed(opened(asked, layer, head))} />
          {a && fieldA && <MapView {...rest} which={state.head} layer={layerA} head={a} field={fieldA} title={nameA} exports={`${file}-one`} about={bestPattern(state)} />}
          {fieldA && <Legend layer={layerA} field={fieldA} state={state} />}
        </div>
        <div>
          <Choice label={compare.b} layer={asked.otherLayer} head={asked.otherHead} choose={(otherLayer, otherHead) => changed({ otherLayer, otherHead })} />
          {b && fieldB && <MapView {...rest} {...unpinned} which={state.otherHead} layer={layerB} head={b} field={fieldB} title={nameB} exports={`${file}-other`} about={bestPattern({ layer: state.otherLayer, head: state.otherHead })} />}
          {fieldB && <Legend layer={layerB} head={state.otherHead} field={fieldB} state={state} />}
        </div>
        <div>
          <p class="choice">{compare.difference}</p>
          {a && less && <MapView {...rest} layer={layerA} head={a} field={less} title={compare.differenceOf(nameA, nameB)} exports={`${file}-difference`} />}
          {less && <Legend layer={layerA} field={less} state={state} />}
          {fieldA && fieldB && !less && <p class="hint">{compare.unlike}</p>}
        </div>
      </div>
      <div class="scroll" tabIndex={0} role="region" aria-label={compare.statistics}>
        <table>
          <thead><tr><th scope="col">{compare.columns.mean}</th><th scope="col">{compare.columns.a}</th><th scope="col">{compare.columns.b}</th><th scope="col">{compare.columns.difference}</th></tr></thead>
          <tbody>
            {data.names.map(({ name, heading, meaning }) => {
              const [x, y] = [statistic(state.layer, state.head, name), statistic(state.otherLayer, state.otherHead, name)];
              return (
                <tr key={name}>
                  <th scope="row" title={meaning}><Term name={name}>{heading}</Term></th>
                  <td>{figure(x)}</td><td>{figure(y)}</td><td>{x === null || y === null ? NO_VALUE : withSign(figure(y - x))}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
      <Meanings names={data.names} />
    </section>
  );
}

function Choice({ label, layer, head, choose }: { label: string; layer: number; head: number; choose: (layer: number, head: number) => void }) {
  return (
    <p class="choice">
      <label>
        {label}{" "}
        <select value={`${layer}.${head}`} onChange={(event) => {
          const [to, number] = event.currentTarget.value.split(".").map(Number);
          choose(to, number);
        }}>
          {all().map((place) => (
            <option key={`${place.layer}.${place.head}`} value={`${place.layer}.${place.head}`}>{nameOf(place.layer, place.head)}</option>
          ))}
        </select>
      </label>
    </p>
  );
}
