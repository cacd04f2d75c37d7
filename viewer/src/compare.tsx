// Two heads side by side, of one recording or of two, at one zoom, and their difference.

import { useEffect, useMemo, useState } from "preact/hooks";
import { data, type Head } from "./data";
import { difference, field, onOneScale } from "./field";
import { Term } from "./glossary";
import { all, bestPattern, type Place } from "./grid";
import { alike, Legend, NoMap, opened, useHead, useShown } from "./head";
import { MapView, type Zoom } from "./map";
import { say } from "./languages";
import { type Other, useOther } from "./other";
import { pairedLayer } from "./shown_side";
import type { Side } from "./side";
import { secondOf, type State } from "./state";
import { Meanings } from "./table";
import { changes, compare, figure, NO_VALUE, whose, withSign } from "./texts";
import { nameOf, statistic } from "./words";

interface Props {
  state: State;
  theme: string;
  change: (part: Partial<State>) => void;
}

export function Compare({ state: asked, theme, change: changed }: Props) {
  const { other } = useOther();
  const wanted = secondOf(asked);
  const from = wanted.side === "b" ? other!.side : null;
  const { state, heads: [a, b], change } = useShown(asked, [useHead(asked.layer, asked.head), useSecond(wanted, from)], changed);
  const second = secondOf(state);
  const [layerA, layerB] = [data.layers[state.layer], second.side === "b" ? pairedLayer(other!.side, second.layer, second.head)! : data.layers[second.layer]];
  const ownA = useMemo(() => (a?.map ? field(a.map, state.pool, state.sink, layerA.map!.exact) : null), [a, state.pool, state.sink]);
  const ownB = useMemo(() => (b?.map ? field(b.map, state.pool, state.sink, layerB.map!.exact) : null), [b, state.pool, state.sink]);
  const [fieldA, fieldB] = useMemo(() => onOneScale(ownA, ownB), [ownA, ownB]);
  const less = useMemo(() => (ownA && ownB ? difference(ownB, ownA) : null), [ownA, ownB]);
  const zoom: Zoom = useMemo(() => ({ at: state.zoom, change: (at) => change({ zoom: at }) }), [state.zoom, change]);
  const pin = (row: number | null, column: number | null) => change({ row, column });
  const unpinned = alike(layerA, layerB) ? {} : { pin: () => undefined, row: null, column: null }; // the selection is a bin of head A
  const both = second.side === "b";
  const named = (side: "A" | "B", place: Place) => (other ? `${side}: ${nameOf(place.layer, place.head)}` : nameOf(place.layer, place.head));
  const [nameA, nameB] = [named("A", state), named(both ? "B" : "A", second)];
  const file = `headscope-${state.layer}.${state.head}-and-${both ? "B-" : ""}${second.layer}.${second.head}`;
  const room = Math.max(320, innerHeight - 180); // so that the maps fit the window
  const rest = { scale: state.scale, colours: state.colours, zoom, theme, pin, row: state.row, column: state.column, most: 900, room };
  const labels = { a: other ? whose.group("A", say(other.labels[0], true)) : compare.a, b: other ? whose.group(both ? "B" : "A", say(other.labels[both ? 1 : 0], true)) : compare.b };
  const columns = !other || both ? compare.columns : { ...whose.columns, mean: compare.columns.mean, difference: whose.within };
  const meanOf = (name: string) => (both ? (other!.side.statistics[layerB.index][name]?.mean[second.head] ?? null) : statistic(second.layer, second.head, name));
  return (
    <section aria-labelledby="compare-title">
      <h2 id="compare-title">{other ? whose.title : compare.title}</h2>
      {!layerA.map && !layerB.map ? <NoMap /> : <p class="hint">{!other || both ? changes.scales : whose.scales}</p>}
      <div class="pair">
        <div>
          <Choice label={labels.a} place={asked} choose={(_, layer, head) => changed(opened(asked, layer, head))} />
          {a && fieldA && <MapView {...rest} which={state.head} layer={layerA} head={a} field={fieldA} title={nameA} exports={`${file}-one`} about={bestPattern(state)} />}
          {fieldA && <Legend layer={layerA} field={fieldA} state={state} />}
        </div>
        <div>
          <Choice label={labels.b} place={wanted} other={other} choose={(otherSide, otherLayer, otherHead) => changed({ otherSide, otherLayer, otherHead })} />
          {b && fieldB && <MapView {...rest} {...unpinned} which={second.head} layer={layerB} head={b} field={fieldB} title={nameB} exports={`${file}-other`} about={both ? "" : bestPattern(second)} />}
          {fieldB && <Legend layer={layerB} head={second.head} field={fieldB} state={state} />}
        </div>
        <div>
          <p class="choice">{!other || both ? compare.difference : whose.within}</p>
          {a && less && <MapView {...rest} layer={layerA} head={a} field={less} title={compare.differenceOf(nameA, nameB)} exports={`${file}-difference`} />}
          {less && <Legend layer={layerA} field={less} state={state} />}
          {fieldA && fieldB && !less && <p class="hint">{compare.unlike}</p>}
        </div>
      </div>
      <div class="scroll" tabIndex={0} role="region" aria-label={compare.statistics}>
        <table>
          <thead><tr><th scope="col">{columns.mean}</th><th scope="col">{columns.a}</th><th scope="col">{columns.b}</th><th scope="col">{columns.difference}</th></tr></thead>
          <tbody>
            {data.names.map(({ name, heading, meaning }) => {
              const [x, y] = [statistic(state.layer, state.head, name), meanOf(name)];
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

/** The second head once it is decoded; null before. */
function useSecond({ layer, head }: Place, from: Side | null): Head | null {
  const own = useHead(layer, head);
  const [found, setFound] = useState<{ from: Side; layer: number; head: number; is: Head } | null>(null);
  useEffect(() => {
    if (!from) return;
    let stale = false;
    void from.head(pairedLayer(from, layer, head)!.index, head).then((is) => !stale && setFound({ from, layer, head, is }));
    return () => void (stale = true);
  }, [from, layer, head]);
  if (!from) return own;
  return found && found.from === from && found.layer === layer && found.head === head ? found.is : null;
}

interface ChoiceProps {
  label: string;
  place: Place & { side?: "a" | "b" };
  other?: Other | null; // whose heads are offered, too
  choose: (side: "a" | "b", layer: number, head: number) => void;
}

/** "3.2", of this page; "b.3.2", of the recording that it is compared with. */
function valueOf(side: "a" | "b", { layer, head }: Place): string {
  return `${side === "b" ? "b." : ""}${layer}.${head}`;
}

function Choice({ label, place: { layer, head, side = "a" }, other, choose }: ChoiceProps) {
  const options = (of: "a" | "b", places: Place[]) => places.map((each) => (
    <option key={`${of}.${each.layer}.${each.head}`} value={valueOf(of, each)}>{nameOf(each.layer, each.head)}</option>
  ));
  const theirs = other ? [...other.is.heads].sort((x, y) => x.layer - y.layer || x.head - y.head) : [];
  return (
    <p class="choice">
      <label>
        {label}{" "}
        <select value={valueOf(side, { layer, head })} onChange={(event) => {
          const [number, to, of] = event.currentTarget.value.split(".").reverse();
          choose(of === "b" ? "b" : "a", Number(to), Number(number));
        }}>
          {other ? (
            <>
              <optgroup label={whose.group("B", say(other.labels[1], true))}>{options("b", theirs)}</optgroup>
              <optgroup label={whose.group("A", say(other.labels[0], true))}>{options("a", all())}</optgroup>
            </>
          ) : options("a", all())}
        </select>
      </label>
    </p>
  );
}
