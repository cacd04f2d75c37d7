// All heads at one step, layers × heads.

import { useEffect, useRef, useState } from "preact/hooks";
import { data } from "./data";
import { COUNT, history, indexOf, type Place, type Quantity } from "./history_data";
import { alarmsAt, drawMark, headName, ink, layerTick, picture, shown, sized } from "./history_draw";
import { useWidth } from "./screen";
import type { State } from "./state";
import { history as texts } from "./texts";

const WIDEST = Math.max(...data.layers.map((layer) => layer.heads));
const TOP = 16; // pixels for the numbers of heads

interface Props {
  state: State;
  theme: string;
  of: Quantity;
  values: Float32Array;
  change: (part: Partial<State>) => void;
}

export function StepGrid({ state, theme, of, values, change }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const [over, setOver] = useState<Place | null>(null);
  const left = data.layers.length === 1 ? 4 : 12 + 7 * Math.max(...data.layers.map((_, at) => layerTick(at).length));
  const width = useWidth(box) - left;
  const cell = Math.max(3, Math.min(34, Math.floor(width / WIDEST), Math.max(10, Math.floor(300 / data.layers.length))));
  const height = TOP + cell * data.layers.length;
  const { moment } = state;
  const valueOf = (place: Place) => values[indexOf(place) * COUNT + moment];
  useEffect(() => {
    if (width <= 0) return;
    const context = sized(canvas.current!, left + cell * WIDEST + 2, height + 2);
    data.layers.forEach(({ heads }, layer) => {
      context.fillStyle = ink("hidden");
      context.fillRect(left, TOP + layer * cell, heads * cell, cell);
    });
    const image = picture(of, WIDEST, data.layers.length, state.colours, (layer, head) => (head < data.layers[layer].heads ? valueOf({ layer, head }) : NaN));
    context.imageSmoothingEnabled = false;
    context.drawImage(image, left, TOP, cell * WIDEST, cell * data.layers.length);
    if (cell > 6) drawLines(context, left, cell);
    drawNumbers(context, left, cell);
    for (const each of alarmsAt(moment)) drawMark(context, each, left + (each.head + 0.5) * cell, TOP + (each.layer + 0.5) * cell, Math.min(5, cell / 2));
    context.strokeStyle = ink("accent");
    context.lineWidth = 2;
    context.strokeRect(left + state.head * cell - 0.5, TOP + state.layer * cell - 0.5, cell, cell);
    canvas.current!.dataset.drawn = String(moment);
  }, [of, values, moment, state.layer, state.head, state.colours, width, theme]);
  const at = (event: MouseEvent): Place | null => {
    const place = canvas.current!.getBoundingClientRect();
    const [head, layer] = [Math.floor((event.clientX - place.left - left) / cell), Math.floor((event.clientY - place.top - TOP) / cell)];
    return head >= 0 && head < (data.layers[layer]?.heads ?? 0) ? { layer, head } : null;
  };
  const pressed = (event: KeyboardEvent) => {
    const [down, across] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] ?? [0, 0];
    if ((!down && !across) || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    const layer = Math.max(0, Math.min(data.layers.length - 1, state.layer + down));
    change({ layer, head: Math.max(0, Math.min(data.layers[layer].heads - 1, state.head + across)) });
  };
  const [low, high] = span(values, moment);
  const told = over ?? state;
  return (
    <div ref={box}>
      <canvas class="history-grid" ref={canvas} tabIndex={0} role="img" aria-label={texts.gridLabel(of.heading, history.steps[moment], shown(low), shown(high))}
        onKeyDown={pressed} onMouseMove={(event) => setOver(at(event))} onMouseLeave={() => setOver(null)}
        onClick={(event) => { const place = at(event); if (place) change({ ...place }); }} />
      <p class="readout">{headName(told.layer, told.head)}: {of.heading} <b>{shown(valueOf(told))}</b></p>
    </div>
  );
}

/** The smallest and the largest value of a step. */
function span(values: Float32Array, moment: number): [number, number] {
  let [low, high] = [NaN, NaN];
  for (let n = moment; n < values.length; n += COUNT) {
    const value = values[n];
    if (!(value >= low)) low = value === value ? value : low;
    if (!(value <= high)) high = value === value ? value : high;
  }
  return [low, high];
}

function drawNumbers(context: CanvasRenderingContext2D, left: number, cell: number): void {
  context.fillStyle = ink("quiet");
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "center";
  const every = Math.ceil((WIDEST > 100 ? 28 : 20) / cell);
  for (let head = 0; head < WIDEST; head += every) context.fillText(String(head), left + (head + 0.5) * cell, TOP / 2);
  if (data.layers.length === 1) return;
  context.textAlign = "right";
  const lines = Math.ceil(13 / cell);
  for (let layer = 0; layer < data.layers.length; layer += lines) context.fillText(layerTick(layer), left - 5, TOP + (layer + 0.5) * cell);
}

/** Lines between the cells. */
function drawLines(context: CanvasRenderingContext2D, left: number, cell: number): void {
  context.fillStyle = ink("panel");
  const height = cell * data.layers.length;
  for (let head = 1; head < WIDEST; head++) context.fillRect(left + head * cell - 1, TOP, 1, height);
  for (let layer = 1; layer < data.layers.length; layer++) context.fillRect(left, TOP + layer * cell - 1, cell * WIDEST, 1);
}
