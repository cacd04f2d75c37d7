// Values over the steps: the band of all heads, and the curves of one head.

import type { ComponentChildren } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { type Alarm, ALARMED, band, COUNT, type Curve, history, layerValues, type Place, placeOn, type Quantity, quantityOf } from "./history_data";
import { across, alarmsOf, areaOf, type Axis, axisOf, down, EDGE, ends, FLAG, headName, momentAt, pathOf, round, SHAPES, shown, ticksOf } from "./history_draw";
import { useWidth } from "./screen";
import type { State } from "./state";
import { history as texts } from "./texts";

interface ChartProps {
  axis: Axis;
  gutter: number;
  height: number;
  label: string;
  moment: number;
  ticks: number[];
  flags: Alarm[];
  limit?: number | null;
  move: (moment: number) => void;
  draw: (width: number, height: number) => ComponentChildren; // into the plot
}

/** A chart whose steps are those of the map above it. A press moves to a step. */
function Chart({ axis, gutter, height, label, moment, ticks, flags, limit, move, draw }: ChartProps) {
  const box = useRef<HTMLDivElement>(null);
  const width = Math.max(0, useWidth(box) - gutter - EDGE);
  const pressed = (event: PointerEvent) => {
    if (event.buttons !== 1 || width === 0) return;
    move(momentAt(event.clientX - box.current!.getBoundingClientRect().left - gutter, width));
  };
  const y = (value: number) => down(placeOn(axis, value), height);
  const marks = ticks.filter((tick, n) => !ticks.slice(0, n).some((other) => Math.abs(y(other) - y(tick)) < 12)); // names do not overlap
  const seen = isSeen(axis, limit);
  return (
    <div class="history-chart" ref={box} onPointerDown={pressed} onPointerMove={pressed}>
      <svg role="img" aria-label={label} width={width + gutter} height={height}>
        {marks.map((tick) => (
          <g key={tick} class="tick">
            <line x1={gutter} x2={gutter + width} y1={y(tick)} y2={y(tick)} />
            <text x={gutter - 4} y={y(tick)}>{round(tick)}</text>
          </g>
        ))}
        <g transform={`translate(${gutter} 0)`}>
          {width > 0 && draw(width, height)}
          {seen && width > 0 && <g class="limit"><line x1={0} x2={width} y1={y(limit)} y2={y(limit)} /></g>}
          {width > 0 && flags.map((each, n) => (
            <polygon key={n} class={`flag ${FLAG[each.what]}`} transform={`translate(${across(each.moment, width)} ${y(each.value)}) scale(5)`} points={SHAPES[each.what].join(" ")} />
          ))}
        </g>
      </svg>
      {width > 0 && <i class="history-now" style={{ left: `${gutter + across(moment, width)}px` }} />}
    </div>
  );
}

function isSeen(axis: Axis, limit: number | null | undefined): limit is number {
  return limit != null && placeOn(axis, limit) <= 1.0001 && placeOn(axis, limit) >= 0;
}

/** The limit of an alarm, in the caption: in the chart a curve would go through it. */
function Limit({ axis, limit }: { axis: Axis; limit: number | null | undefined }) {
  return isSeen(axis, limit) ? <small class="history-limit">┄ {texts.limit(round(limit))}</small> : null;
}

interface BandProps {
  name: string;
  place: [number, number];
  gutter: number;
  state: State;
  selected: Float32Array | null; // the selected head's values
  change: (part: Partial<State>) => void;
}

export function Band({ name, place, gutter, state, selected, change }: BandProps) {
  const of = quantityOf(name);
  const [curves, setCurves] = useState<Curve[] | null>(null);
  useEffect(() => void band(place).then(setCurves), [place]);
  const limit = history.limits[name];
  const parts = (curves ?? []).map((curve) => shown(curve[state.moment]));
  const draw = useMemo(() => {
    let last: { key: string; is: ComponentChildren } | null = null;
    return (width: number, height: number) => {
      if (!curves) return null;
      const key = `${width} ${height}`;
      last = last?.key === key ? last : { key, is: (
        <>
          <path class="all" d={areaOf(of, curves[0], curves[4], width, height)} />
          <path class="most" d={areaOf(of, curves[1], curves[3], width, height)} />
          <path class="median" d={pathOf(of, curves[2], width, height)} />
          {selected && <path class="selected" d={pathOf(of, selected, width, height)} />}
        </>
      ) };
      return last.is;
    };
  }, [curves, selected]);
  return (
    <figure class="history-band">
      <figcaption>{texts.bands(of.heading)} {of.scale === "asinh" && <small title={texts.logScale}>{texts.log}</small>} <Limit axis={of} limit={limit} /></figcaption>
      <Chart axis={of} height={70} ticks={ticksOf(of)} moment={state.moment} label={texts.bandLabel(of.heading, history.steps[state.moment], parts)}
        flags={alarmsOf(state).filter((each) => ALARMED[each.what] === name)} move={(moment) => change({ moment })} {...{ gutter, limit, draw }} />
    </figure>
  );
}

/** The values of all quantities of a head; of the last one until they are decoded. */
export function useCurves({ layer, head }: Place): { layer: number; head: number; curves: Float32Array[] } | null {
  const [found, setFound] = useState<{ layer: number; values: Float32Array[] } | null>(null);
  useEffect(() => {
    let stale = false;
    void layerValues(layer).then((values) => !stale && setFound({ layer, values }));
    return () => void (stale = true);
  }, [layer]);
  return useMemo(() => {
    if (!found || found.layer !== layer) return null;
    return { layer, head, curves: found.values.map((values) => values.subarray(head * COUNT, (head + 1) * COUNT)) };
  }, [found, layer, head]);
}

interface CurvesProps {
  state: State;
  found: ReturnType<typeof useCurves>;
  change: (part: Partial<State>) => void;
}

/** One head: the curve of each quantity, on an axis of its own. */
export function Curves({ state, found, change }: CurvesProps) {
  if (!found) return null;
  return (
    <div class="history-curves">
      {history.quantities.map((of, n) => <HeadCurve key={of.name} {...{ of, state, change }} curve={found.curves[n]} />)}
    </div>
  );
}

function HeadCurve({ of, curve, state, change }: { of: Quantity; curve: Float32Array; state: State; change: (part: Partial<State>) => void }) {
  const axis = useMemo(() => axisOf(of, [curve]), [of, curve]);
  const draw = useMemo(() => {
    let last: { width: number; is: ComponentChildren } | null = null;
    return (width: number, height: number) => {
      last = last?.width === width ? last : { width, is: <path class="selected" d={pathOf(axis, curve, width, height)} /> };
      return last.is;
    };
  }, [axis, curve]);
  const known = curve.filter((value) => value === value);
  if (known.length === 0) return null;
  const [low, high] = ends(axis).map(shown);
  const value = shown(curve[state.moment]);
  const name = headName(state.layer, state.head);
  const flags = alarmsOf(state).filter((each) => ALARMED[each.what] === of.name);
  return (
    <figure title={of.meaning}>
      <figcaption><button type="button" aria-pressed={state.quantity === of.name} onClick={() => change({ quantity: of.name })}>{of.heading}</button> {of.scale === "asinh" && <small title={texts.logScale}>{texts.log}</small>} <Limit axis={axis} limit={history.limits[of.name]} /> <b>{value}</b></figcaption>
      <Chart axis={axis} gutter={44} height={54} ticks={known.every((value) => value === known[0]) ? [known[0]] : ends(axis)} moment={state.moment} limit={history.limits[of.name]}
        label={texts.curveLabel(of.heading, name, history.steps[state.moment], value, low, high)} move={(moment) => change({ moment })} {...{ flags, draw }} />
    </figure>
  );
}
