// Heads × steps as a map in colours, with the alarms as flags.

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { data } from "./data";
import { fitted } from "./draw";
import { type Alarm, alarms, COUNT, firstAlarms, history, indexOf, type Place, type Quantity } from "./history_data";
import { across, alarmsOf, drawMark, EDGE, headName, ink, layerTick, momentAt, picture, shown, sized, tickName } from "./history_draw";
import { useWidth } from "./screen";
import type { State } from "./state";
import { history as texts } from "./texts";

interface Props {
  state: State;
  theme: string;
  of: Quantity;
  values: Float32Array;
  rows: Place[];
  change: (part: Partial<State>) => void;
  gutter: number; // pixels at the left for names
}

const LEAST = 2; // pixels of a row
const MOST = 26;
const REST = 500; // pixels for what is above the map, the slider and the bands

const SMALLEST = 3; // pixels from the middle of a mark to its corners

export function HeadsMap({ state, theme, of, values, rows, change, gutter }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const [over, setOver] = useState<string | null>(null);
  const width = useWidth(box) - gutter - EDGE;
  const room = Math.max(180, Math.min(560, innerHeight - REST));
  const row = Math.max(LEAST, Math.min(MOST, Math.floor(room / rows.length)));
  const height = row * rows.length;
  const view = Math.min(height, room); // only what is in view is drawn: a canvas as high as all rows may be too large for a browser
  const [top, setTop] = useState(0);
  const order = useMemo(() => rows.map(indexOf), [rows]);
  const places = useMemo(() => new Map(order.map((head, at) => [head, at])), [order]);
  const image = useMemo(() => picture(of, COUNT, order.length, state.colours, (at, n) => values[order[at] * COUNT + n]), [of, values, order, state.colours]);
  useEffect(() => {
    if (width <= 0) return;
    const context = sized(canvas.current!, width + gutter, view);
    context.fillStyle = ink("hidden");
    context.fillRect(gutter, 0, width, view);
    const from = Math.min(top, height - view);
    context.translate(0, -from);
    context.imageSmoothingEnabled = COUNT > width * devicePixelRatio;
    context.drawImage(image, 0, from / row, COUNT, view / row, gutter, from, width, view);
    drawNames(context, rows, row, gutter, state.rank === "layer");
    drawStarts(context, gutter, width, height);
    const flag = (each: Alarm, size: number) => drawMark(context, each, gutter + across(each.moment, width), (places.get(indexOf(each))! + 0.5) * row, size);
    const size = Math.max(4, Math.min(6, row / 2));
    const inView = (each: Alarm) => Math.abs((places.get(indexOf(each))! + 0.5) * row - from - view / 2) < view / 2 + size;
    for (const each of alarms) if (inView(each)) flag(each, Math.max(SMALLEST, size / 2)); // a repeated one is small
    for (const each of firstAlarms.filter(inView).reverse()) flag(each, size);
    canvas.current!.dataset.drawn = "yes";
  }, [image, width, height, view, top, rows, theme]);
  const selected = places.get(indexOf(state))!;
  useEffect(() => { // the selected head stays in sight
    const frame = box.current!;
    if (frame.scrollHeight <= frame.clientHeight) return;
    const top = selected * row;
    if (top < frame.scrollTop || top + row > frame.scrollTop + frame.clientHeight) frame.scrollTop = top - frame.clientHeight / 2;
  }, [selected, row]);
  useLayoutEffect(() => setOver(null), [state.moment, state.layer, state.head]); // a pointer at rest hides the next selection no longer
  const at = (event: MouseEvent) => {
    const place = canvas.current!.getBoundingClientRect();
    const x = event.clientX - place.left - gutter;
    const which = rows[Math.max(0, Math.min(rows.length - 1, Math.floor((event.clientY - place.top + top) / row)))];
    return { x, which, moment: x < 0 ? null : momentAt(x, width) };
  };
  const hovered = (event: MouseEvent) => {
    const { which: { layer, head }, moment } = at(event);
    if (moment === null) return setOver(headName(layer, head));
    const value = texts.value(headName(layer, head), history.steps[moment], of.heading, shown(values[indexOf({ layer, head }) * COUNT + moment]));
    const near = Math.max(0, Math.round((6 / width) * COUNT));
    const raised = alarmsOf({ layer, head }).filter((each) => Math.abs(each.moment - moment) <= near);
    setOver([value, ...raised.map((each) => `${texts.marks[each.what]} ${texts.alarm(texts.flags[each.what], shown(each.value), shown(each.limit))}`)].join(" · "));
  };
  /** A click near a flag selects its step, too. */
  const clicked = (event: MouseEvent) => {
    const { x, which, moment } = at(event);
    const near = alarmsOf(which).filter((each) => Math.abs(across(each.moment, width) - x) <= 7);
    change({ ...which, ...(moment === null ? {} : { moment: near[0]?.moment ?? moment }) });
  };
  const pressed = (event: KeyboardEvent) => {
    const by = { ArrowUp: -1, ArrowDown: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (!by || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    change(rows[Math.max(0, Math.min(rows.length - 1, selected + by))]);
  };
  return (
    <div>
      <div class="history-map" ref={box} style={{ maxHeight: `${room}px` }} onScroll={(event) => setTop(event.currentTarget.scrollTop)}>
        <div class="history-rows" style={{ height: `${height}px` }}>
          <canvas ref={canvas} tabIndex={0} role="img" aria-label={texts.mapLabel(of.heading, rows.length, COUNT)} onClick={clicked} onMouseMove={hovered} onMouseLeave={() => setOver(null)} onKeyDown={pressed} />
          {width > 0 && <i class="history-row" style={{ top: `${selected * row}px`, height: `${row}px`, left: `${gutter}px`, width: `${width}px` }} />}
          {width > 0 && <i class="history-now" style={{ left: `${gutter + across(state.moment, width)}px` }} />}
        </div>
      </div>
      <p class="readout" aria-live="polite">{over ?? texts.value(headName(state.layer, state.head), history.steps[state.moment], of.heading, shown(values[indexOf(state) * COUNT + state.moment]))}</p>
    </div>
  );
}

/** Each head where its row has room for a name, else each layer where its first head is, if they are in that order. */
function drawNames(context: CanvasRenderingContext2D, rows: Place[], row: number, gutter: number, byLayer: boolean): void {
  context.fillStyle = ink("quiet");
  context.font = `${Math.min(12, Math.max(10, row - 2))}px system-ui, sans-serif`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  let free = -Infinity;
  rows.forEach(({ layer, head }, at) => {
    const y = (at + 0.5) * row;
    const begins = at === 0 || rows[at - 1].layer !== layer;
    const whole = row >= 11;
    const name = whole ? tickName(layer, head) : byLayer && begins && row * data.layers[layer].heads >= 4 ? layerTick(layer) : "";
    if (!name || (!whole && y < free)) return;
    context.fillText(fitted(name, gutter - 6), gutter - 4, Math.max(y, 6));
    free = y + 12;
  });
}

/** A line where a watch began, after the first one. */
function drawStarts(context: CanvasRenderingContext2D, gutter: number, width: number, height: number): void {
  context.fillStyle = ink("quiet");
  for (const start of history.starts.slice(1)) {
    const moment = history.steps.findIndex((step) => step >= start);
    if (moment > 0) context.fillRect(gutter + (moment / COUNT) * width - 0.5, 0, 1, height);
  }
}
