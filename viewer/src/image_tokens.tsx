// The images in the prompt of a vision-language model: the weight on each of their patches, from a token or a segment.

import { useEffect, useRef, useState } from "preact/hooks";
import type { Layer, SegmentFacts } from "./data";
import { queryAt } from "./data";
import { colour, type Field, place } from "./field";
import { single } from "./head";
import type { State } from "./state";
import { percent, segments as texts } from "./texts";
import { bin, mapValue } from "./words";

const SIDE = 200; // pixels of the longer side

interface Props {
  layer: Layer;
  field: Field;
  state: State;
  theme: string;
  change: (part: Partial<State>) => void;
}

export function ImageTokens({ layer, field: of, state, theme, change }: Props) {
  const facts = layer.segments;
  if (!facts || facts.images.length === 0) return null;
  if (!single(layer)) return <p class="hint">{texts.imagePooled(layer.lengths?.[1] ?? 0)}</p>;
  const segment = state.patchesOf !== null && state.patchesOf < facts.names.length ? state.patchesOf : null;
  const query = state.row ?? of.rows - 1;
  const weights = segment === null ? of.values.subarray(query * of.columns, (query + 1) * of.columns) : meanOf(layer, facts, of, segment);
  const keys = facts.images.map((image) => image.rows.flatMap((start) => Array.from({ length: image.columns }, (_, n) => start + n)));
  const top = Math.max(...keys.flat().map((key) => weights[key] || 0)) || 1;
  const pin = (key: number) => change({ row: query, column: key });
  return (
    <div class="image-tokens">
      <p class="switches">
        <label>{texts.images}{" "}
          <select value={segment ?? ""} onChange={(event) => change({ patchesOf: event.currentTarget.value === "" ? null : Number(event.currentTarget.value) })}>
            <option value="">{texts.selectedToken(bin(layer, "query", query))}</option>
            {facts.names.map((name, n) => <option key={n} value={n}>{texts.segmentTokens(name)}</option>)}
          </select></label>
      </p>
      <div class="pictures">
        {facts.images.map((image, n) => (
          <Patches key={n} {...{ image, weights, top, state, theme, pin }} share={keys[n].reduce((sum, key) => sum + (weights[key] || 0), 0)} />
        ))}
      </div>
      <p class="hint">{texts.imageHint}</p>
    </div>
  );
}

/** The mean over the rows of a segment's tokens; a masked weight counts as 0. */
function meanOf(layer: Layer, { spans }: SegmentFacts, of: Field, segment: number): Float32Array {
  const sum = new Float32Array(of.columns);
  let rows = 0;
  for (const [name, start, stop] of spans) {
    if (name !== segment) continue;
    for (let query = Math.max(0, start - queryAt(layer, 0)); query < stop - queryAt(layer, 0) && query < of.rows; query++, rows++) {
      for (let key = 0; key < of.columns; key++) sum[key] += of.values[query * of.columns + key] || 0;
    }
  }
  return sum.map((value) => value / (rows || 1));
}

interface PatchesProps {
  image: SegmentFacts["images"][number];
  weights: Float32Array;
  top: number;
  share: number;
  state: State;
  theme: string;
  pin: (key: number) => void;
}

function Patches({ image, weights, top, share, state, theme, pin }: PatchesProps) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [over, setOver] = useState("");
  const { name, columns, rows } = image;
  const side = Math.max(2, Math.floor(SIDE / Math.max(columns, rows.length)));
  useEffect(() => {
    canvas.current!.width = columns * side;
    canvas.current!.height = rows.length * side;
    const context = canvas.current!.getContext("2d")!;
    const scale = { top, signed: false } as Field;
    rows.forEach((start, row) => {
      for (let column = 0; column < columns; column++) {
        const value = weights[start + column];
        if (value !== value) continue;
        context.fillStyle = colour(place(value, scale, state.scale), state.colours).fill;
        context.fillRect(column * side, row * side, side, side);
      }
    });
    const selected = rows.findIndex((start) => state.column !== null && state.column >= start && state.column < start + columns);
    if (selected >= 0) {
      context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--accent");
      context.lineWidth = 2;
      context.strokeRect((state.column! - rows[selected]) * side + 1, selected * side + 1, side - 2, side - 2);
    }
    canvas.current!.dataset.drawn = "yes";
  }, [image, weights, top, state.scale, state.colours, state.column, theme]);
  const at = (event: MouseEvent): [number, number] => {
    const box = canvas.current!.getBoundingClientRect();
    const part = (x: number, length: number, parts: number) => Math.max(0, Math.min(parts - 1, Math.floor((x / length) * parts)));
    return [part(event.clientY - box.top, box.height, rows.length), part(event.clientX - box.left, box.width, columns)];
  };
  return (
    <figure>
      <canvas ref={canvas} class="patches" role="img" aria-label={texts.imageLabel(name)} style={{ width: `${columns * side}px` }}
        onMouseMove={(event) => {
          const [row, column] = at(event);
          setOver(texts.patch(row, column, mapValue(weights[rows[row] + column])));
        }}
        onMouseLeave={() => setOver("")}
        onClick={(event) => {
          const [row, column] = at(event);
          pin(rows[row] + column);
        }} />
      <figcaption><bdi>{texts.imageShare(name, percent(share))}</bdi> {over}</figcaption>
    </figure>
  );
}
