// An image on the first screen: the selected patch, and where it attends in the head of a card, drawn over the image.

import { useEffect, useRef } from "preact/hooks";
import { data, hasPatches } from "./data";
import { field } from "./field";
import { single, useHead } from "./head";
import { drawAttended, keyName, queryOf, rowOf, theImage } from "./picture";
import type { State } from "./state";
import { CanvasSurface } from "./surface";
import { described, fill, image as texts, percent } from "./texts";

const SIDE = 168; // pixels of the longer side

interface Props {
  state: State;
  place: { layer: number; head: number }; // whose attention is shown
  theme: string;
  change: (part: Partial<State>) => void;
}

export function Attended({ state, place, theme, change }: Props) {
  const layer = data.layers[place.layer];
  const head = useHead(place.layer, place.head);
  if (!hasPatches(layer)) return null;
  const query = queryOf(state, place.layer, place.head);
  const name = keyName(query);
  const map = head?.map && single(layer) ? field(head.map, "mean", false, true) : null;
  const weights = map && query < map.rows ? rowOf(map, query) : null;
  const most = weights ? strongest(weights) : null;
  const pin = (at: number) => change({ row: at, column: at });
  const heading = `${layer.short}.${place.head}`;
  const strongestKey = most === null || !weights ? texts.noWeight : fill(texts.firstMost, { key: keyName(most), share: percent(weights[most]) }).join("");
  return (
    <div class="attended">
      <Picture {...{ query, theme, pin }} weights={null} label={texts.label(texts.titles.image, name, described.image(...data.image!.grid))}
        caption={fill(texts.first, { name: <b>{name}</b> })} />
      {weights && (
        <Picture {...{ query, weights, theme, pin }} label={texts.label(texts.firstTitle(name, heading), name, strongestKey)}
          caption={fill(texts.firstHead, { head: <b>{heading}</b>, name: <b>{name}</b>, most: most === null ? texts.noWeight : fill(texts.firstMost, { key: <b>{keyName(most)}</b>, share: percent(weights[most]) }) })} />
      )}
    </div>
  );
}

/** The key with the largest weight, CLS and registers included; null where all are masked. */
function strongest(weights: Float32Array): number | null {
  let at: number | null = null;
  weights.forEach((p, key) => p === p && (at === null || p > weights[at]) && (at = key));
  return at;
}

interface PictureProps {
  query: number;
  weights: Float32Array | null;
  theme: string;
  label: string;
  caption: preact.ComponentChildren;
  pin: (at: number) => void;
}

function Picture({ query, weights, theme, label, caption, pin }: PictureProps) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const { grid: [rows, columns], special } = data.image!;
  const { width, height } = theImage(false);
  const side = SIDE / Math.max(width, height);
  const size: [number, number] = [Math.round(width * side), Math.round(height * side)];
  useEffect(() => {
    const ratio = window.devicePixelRatio || 1;
    canvas.current!.width = size[0] * ratio;
    canvas.current!.height = size[1] * ratio;
    const context = canvas.current!.getContext("2d")!;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    drawAttended(new CanvasSurface(context), weights, query, size);
    canvas.current!.dataset.drawn = "yes";
  }, [weights, query, theme, ...size]);
  const click = (event: MouseEvent) => {
    const box = canvas.current!.getBoundingClientRect();
    const part = (x: number, length: number, parts: number) => Math.max(0, Math.min(parts - 1, Math.floor((x / length) * parts)));
    pin(special + part(event.clientY - box.top, box.height, rows) * columns + part(event.clientX - box.left, box.width, columns));
  };
  const pressed = (event: KeyboardEvent) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (!by) return;
    event.preventDefault();
    const to = Math.max(query, special) + by;
    if (to >= special && to < special + rows * columns) pin(to);
  };
  return (
    <figure>
      <canvas ref={canvas} class="patches" tabIndex={0} role="img" aria-label={label} style={{ width: `${size[0]}px`, height: `${size[1]}px` }} onClick={click} onKeyDown={pressed} />
      <figcaption>{caption}</figcaption>
    </figure>
  );
}
