// The figures of one head: its map, a picture of it over an image, its strip, the text with lines.

import { data, hasTokens, type Layer } from "./data";
import { singles } from "./draw";
import type { Colours, Field, Scale } from "./field";
import { type Axis, axisOf, type Bar, coloursOn, drawCells, type Figure, hasMasked, origin, type Paper, plotted, sidesOf, textOf, ticksOf } from "./figure";
import { asField, isExact, type Tile } from "./tiles";
import { figures as texts, legend, map as mapTexts, names, NO_VALUE } from "./texts";
import { binning, ending, oneOf, withoutFirst } from "./words";

/** A scale of colours with its numbers, and what it is of. */
export function barOf(of: Pick<Field, "top" | "signed" | "above">, kind: "difference" | "weight" | "mean" | "max", scale: Scale, colours: Colours): Bar {
  return { label: legend.what(kind, of.signed ? "linear" : scale), colours, signed: of.signed, ticks: ticksOf(of, scale) };
}

/** "Layer 3, head 3 · induction 83 %". */
export function titled(name: string, about: string): string {
  return [names.title(name), about === NO_VALUE ? "" : about].filter(Boolean).join(" · ");
}

interface Mapped {
  name: string; // of the file
  title: string;
  about: string; // what the head does
  layer: Layer;
  field: Field;
  scale: Scale;
  colours: Colours;
  at: [number, number, number]; // the zoom
  tile: Tile | null;
}

interface Piece {
  field: Field;
  rows: Axis;
  columns: Axis;
}

/** The visible bins of a map, or the tile over them. */
function pieceOf({ layer, field, at: [k, x, y], tile }: Mapped): Piece {
  if (tile) {
    const exact = isExact(tile) && layer.map!.ranges && hasTokens(layer);
    const axis = (which: "query" | "key", [start, stop]: [number, number]): Axis =>
      ({ title: layer.map!.ranges ? mapTexts.axis(which) : tile && tile.window !== null ? mapTexts.axisOfWindow(which, tile.window) : mapTexts.axisOfLast(which), start, stop, text: exact ? textOf(layer, which) : null });
    return { field: asField(tile, field.pool), rows: axis("query", tile.queries), columns: axis("key", tile.keys) };
  }
  const visible = (middle: number, bins: number): [number, number] => {
    const from = Math.min(1 - 1 / k, Math.max(0, middle - 0.5 / k));
    return [Math.floor(from * bins + 1e-6), Math.max(0, Math.min(bins, Math.ceil((from + 1 / k) * bins - 1e-6)))];
  };
  const [rows, columns] = [visible(y, field.rows), visible(x, field.columns)];
  const named = (which: "query" | "key") => hasTokens(layer) && singles(layer, which);
  return {
    field: cropped(field, rows, columns),
    rows: axisOf(layer, "query", rows, field.rows, named("query")),
    columns: axisOf(layer, "key", columns, field.columns, named("key")),
  };
}

function cropped(field: Field, [top, bottom]: [number, number], [left, right]: [number, number]): Field {
  const [rows, columns] = [bottom - top, right - left];
  const values = new Float32Array(rows * columns);
  for (let row = 0; row < rows; row++) values.set(field.values.subarray((top + row) * field.columns + left, (top + row) * field.columns + right), row * columns);
  return { ...field, rows, columns, values };
}

/** The map of a head, or of a difference: what is in sight, without selection. */
export function mapFigure(mapped: Mapped, paper: Paper): Figure {
  const { layer, field: whole, scale, tile } = mapped;
  const colours = coloursOn(mapped.colours, paper.dark);
  const { field, rows, columns } = pieceOf(mapped);
  const one = tile ? isExact(tile) : layer.map!.exact;
  const sides = sidesOf(field.columns, field.rows, columns.text !== null || rows.text !== null);
  return {
    name: mapped.name,
    title: titled(mapped.title, mapped.about),
    caption: [
      ...origin(),
      texts.range(rows.title, rows.start, rows.stop, columns.title, columns.start, columns.stop),
      tile ? (one ? legend.oneWeight : texts.pooledTile) : binning(layer, field.pool),
      tile && oneOf(layer, tile.window) ? texts.ofInput(oneOf(layer, tile.window)) : "",
      whole.signed ? texts.signed : texts.scale(scale),
      whole.signed || tile ? "" : ending(whole),
      withoutFirst(layer, whole),
      hasMasked(field) ? texts.masked(whole.signed, layer.broken.some(Boolean)) : "",
      mapped.about ? texts.match(mapped.about) : "",
      data.bits === 8 && !tile ? texts.rough : "",
    ],
    body: plotted(columns, rows, sides, paper, (surface, box) => drawCells(surface, field, scale, colours, box, paper)),
    bar: barOf(field, whole.signed ? "difference" : one ? "weight" : field.pool, scale, colours),
  };
}

