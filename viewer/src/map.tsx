// The map of a head on a canvas: zoom, pan, a tooltip, and a cell that can be selected.

import { select } from "d3-selection";
import { zoom as zooming, zoomIdentity, type ZoomTransform } from "d3-zoom";
import { useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { type Head, type Layer, range } from "./data";
import { describeMap } from "./describe";
import { draw, geometry, type Inks, type Scene, type Sight } from "./draw";
import { type Colours, type Field, Pictures, type Scale } from "./field";
import { useWidth } from "./screen";
import { hasBands, segmentInks } from "./bands";
import { FigureMenu } from "./figure_menu";
import { mapFigure } from "./figures";
import { CanvasSurface } from "./surface";
import { asField, isExact, served, tile as askTile, type Tile, why } from "./tiles";
import * as texts from "./texts";
import { figure, fill } from "./texts";
import { Closeness } from "./why";
import { argmax, bin, mapValue, oneOf, position } from "./words";

export interface Zoom {
  at: [number, number, number];
  change: (at: [number, number, number]) => void;
}

interface Props {
  layer: Layer;
  head: Head;
  number?: number; // of the head, if the page may request tiles of it
  window?: number | null; // of a text in windows: the one that is shown alone
  which?: number; // of the head, for its description
  field: Field;
  scale: Scale;
  colours: Colours;
  zoom: Zoom;
  row: number | null;
  column: number | null;
  pin: (row: number | null, column: number | null, cell?: [number, number]) => void;
  cell?: [number, number] | null; // the selected query and key, of a tile
  inSight?: (tile: Tile | null) => void; // called with the tile that is shown in place of bins
  most: number; // pixels of the map's side
  room?: number; // pixels of the height, with axes
  title: string;
  theme: string;
  exports?: string; // the name of files
  about?: string; // what the head does, for the title of its figure
}

/** The colours of the page. */
function inks(): Inks {
  const style = getComputedStyle(document.documentElement);
  const of = (name: string) => style.getPropertyValue(name).trim();
  return {
    ink: of("--ink"), quiet: of("--quiet"), ground: of("--panel"),
    hidden: of("--hidden"), accent: of("--accent"), soft: of("--soft"), profile: of("--profile"),
  };
}

/** The visible part, from the scale and the middle as shares. */
function sightOf([k, x, y]: [number, number, number], side: number): Sight {
  const within = (at: number) => Math.min(0, Math.max(side - k * side, side / 2 - at * k * side));
  return { k, x: within(x), y: within(y) };
}

export function save(name: string, content: Blob): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const LABELS = 20; // pixels of the name of an axis, which is not a label

/** The largest value of a row or column: its column, or its row. */
function largestOf(of: Field, at: { row: number } | { column: number }): number {
  let [best, most] = [0, -1];
  const count = "row" in at ? of.columns : of.rows;
  for (let n = 0; n < count; n++) {
    const value = "row" in at ? of.values[at.row * of.columns + n] : of.values[n * of.columns + at.column];
    if (value > most) [best, most] = [n, value];
  }
  return best;
}

export function MapView(props: Props) {
  const { layer, head, field, zoom, most, title, pin } = props;
  const frame = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const behaviour = useRef<ReturnType<typeof zooming<HTMLCanvasElement, unknown>> | null>(null);
  const width = useWidth(frame);
  const closest = Math.max(8, ...((props.number !== undefined && served(layer, props.number, props.window)) || [field.rows, field.columns]).map((length) => length / 4));
  // While the map moves, only the map is drawn; the rest of the page follows once it rests.
  const [asked, setAt] = useState(zoom.at);
  const within = ([k, x, y]: Zoom["at"]): Zoom["at"] => [Math.min(closest, k), x, y];
  const at = within(asked);
  const resting = useRef(0);
  const gone = useRef(false);
  const following = useRef(false);
  useLayoutEffect(() => {
    setAt(zoom.at);
    clearTimeout(resting.current); // a zoom from elsewhere is the newer one
  }, [zoom.at]);
  useLayoutEffect(() => () => {
    gone.current = true;
    clearTimeout(resting.current);
  }, []);
  const changed = useRef(zoom.change);
  changed.current = zoom.change;
  const move = (to: Zoom["at"]) => {
    if (gone.current) return; // d3 listens to a drag on the window until the button is let go
    setAt(to);
    clearTimeout(resting.current);
    resting.current = setTimeout(() => changed.current(to), 120);
  };
  const [over, setOver] = useState<Hit | null>(null);
  useEffect(() => {
    if (!over) return;
    const scrolled = () => setOver(null); // another cell is under the pointer
    const escaped = (event: KeyboardEvent) => {
      if (event.key !== "Escape") return;
      setOver(null);
      event.stopPropagation();
    };
    addEventListener("scroll", scrolled);
    addEventListener("keydown", escaped, true);
    return () => {
      removeEventListener("scroll", scrolled);
      removeEventListener("keydown", escaped, true);
    };
  }, [over === null]);
  const pictures = useMemo(() => new Pictures(field, props.scale, props.colours), [field, props.scale, props.colours]);
  const places = useMemo(() => geometry(width, most, layer, props.room), [width, most, layer, props.room]);
  const side = places.plot.width;
  const { tile, failed } = useTile(props, at);
  const finer = useMemo(
    () => tile && { pictures: new Pictures(asField(tile, field.pool), props.scale, props.colours), queries: tile.queries, keys: tile.keys, lengths: tile.lengths, window: tile.window },
    [tile, field, props.scale, props.colours],
  );
  useLayoutEffect(() => props.inSight?.(tile), [tile]);
  const scene = useRef<Scene | null>(null);
  const colours = useMemo(inks, [props.theme]);
  const ratio = window.devicePixelRatio || 1;
  scene.current = {
    layer, head, field, pictures, geometry: places, inks: colours, ratio,
    bands: hasBands(layer) ? segmentInks() : null,
    sight: sightOf(at, side), row: props.row, column: props.column, cell: props.cell ?? null, tile: finer,
  };

  useLayoutEffect(() => {
    const element = canvas.current!;
    element.width = Math.round(places.width * ratio);
    element.height = Math.round(places.height * ratio);
    element.style.width = `${places.width}px`;
    element.style.height = `${places.height}px`;
  }, [places, ratio]);

  useLayoutEffect(() => {
    const context = canvas.current!.getContext("2d")!;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    draw(new CanvasSurface(context), scene.current!);
  });

  useLayoutEffect(() => {
    const { plot } = places;
    const area: [[number, number], [number, number]] = [[plot.x, plot.y], [plot.x + side, plot.y + side]];
    const made = zooming<HTMLCanvasElement, unknown>()
      .scaleExtent([1, closest])
      .extent(area)
      .translateExtent(area)
      .clickDistance(4)
      // where everything is visible, turning the wheel to zoom out scrolls the page
      .filter((event: MouseEvent | WheelEvent) =>
        !event.button && !(event.type === "wheel" && (event as WheelEvent).deltaY > 0 && scene.current!.sight.k <= 1))
      .on("zoom", (event: { transform: ZoomTransform; sourceEvent: Event | null }) => {
        if (!event.sourceEvent || following.current) return; // set from outside
        const { k } = event.transform;
        const [x, y] = event.transform.invert([plot.x + side / 2, plot.y + side / 2]);
        move([k, (x - plot.x) / side, (y - plot.y) / side]);
      });
    const selected = select(canvas.current!);
    selected.call(made).on("dblclick.zoom", null);
    behaviour.current = made;
    return () => void selected.on(".zoom", null);
  }, [places, closest]);

  useLayoutEffect(() => {
    const { plot } = places;
    const { k, x, y } = sightOf(within(zoom.at), side);
    const transform = zoomIdentity.translate(x + plot.x * (1 - k), y + plot.y * (1 - k)).scale(k);
    following.current = true; // during a drag d3 gives the drag's last event as the source of this, too
    select(canvas.current!).call(behaviour.current!.transform, transform);
    following.current = false;
  }, [zoom.at, places, closest]);

  const cell = (event: MouseEvent) => {
    const box = canvas.current!.getBoundingClientRect();
    const { plot } = places;
    const { sight } = scene.current!;
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const [across, down] = [(x - plot.x - sight.x) / sight.k / side, (y - plot.y - sight.y) / sight.k / side];
    const column = Math.floor(across * field.columns);
    const row = Math.floor(down * field.rows);
    const inside = x >= plot.x && y >= plot.y && x <= plot.x + side && y <= plot.y + side;
    return inside && column < field.columns && row < field.rows && row >= 0 && column >= 0 ? { layer, row, column, across, down, x: event.clientX, y: event.clientY } : null;
  };
  /** The row or column whose label is under the pointer, left of the map or above it. */
  const labelled = (event: MouseEvent): { row: number } | { column: number } | null => {
    const box = canvas.current!.getBoundingClientRect();
    const { plot } = places;
    const { sight } = scene.current!;
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const [across, down] = [(x - plot.x - sight.x) / sight.k / side, (y - plot.y - sight.y) / sight.k / side];
    if (x > LABELS && x < plot.x && y >= plot.y && y < plot.y + side) return { row: Math.min(field.rows - 1, Math.floor(down * field.rows)) };
    if (y > LABELS && y < plot.y && x >= plot.x && x < plot.x + side) return { column: Math.min(field.columns - 1, Math.floor(across * field.columns)) };
    return null;
  };
  const click = (event: MouseEvent) => {
    const label = labelled(event);
    if (label && "row" in label) return pin(label.row, largestOf(field, { row: label.row }));
    if (label) return pin(props.row ?? largestOf(field, label), label.column);
    const hit = cell(event);
    if (!hit) return;
    const at = tile && cellOf(tile, hit.across, hit.down);
    const to = tile && at && isExact(tile) ? ([tile.queries[0] + at[0], tile.keys[0] + at[1]] as [number, number]) : undefined;
    const same = hit.row === props.row && hit.column === props.column && String(to) === String(props.cell ?? undefined);
    pin(same ? null : hit.row, same ? null : hit.column, same ? undefined : to);
  };
  const moved = (down: number, across: number) => {
    const row = Math.min(field.rows - 1, Math.max(0, down));
    const column = Math.min(field.columns - 1, Math.max(0, across));
    pin(row, column);
    const { k, x, y } = scene.current!.sight;
    const outside = (share: number, offset: number) => share * k * side + offset < 0 || share * k * side + offset > side;
    const [right, below] = [(column + 0.5) / field.columns, (row + 0.5) / field.rows];
    if (outside(right, x) || outside(below, y)) zoom.change([at[0], right, below]); // it stays in sight
  };
  const closer = (by: number) => {
    const [x, y] = by > 1 && props.row !== null && props.column !== null ? [(props.column + 0.5) / field.columns, (props.row + 0.5) / field.rows] : [at[1], at[2]];
    zoom.change([Math.min(closest, Math.max(1, at[0] * by)), x, y]); // to the selection, if there is one
  };
  const pressed = (event: KeyboardEvent) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (step && event.shiftKey) moved((props.row ?? 0) + step[0], (props.column ?? 0) + step[1]);
    else if (event.key === "+" || event.key === "=") closer(2);
    else if (event.key === "-") closer(0.5);
    else if (event.key === "0") zoom.change([1, 0.5, 0.5]);
    else if (event.key === "Escape" && (props.row ?? props.column) !== null) pin(null, null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };

  const described = useMemo(() => describeMap(layer, head, field, title, props.which ?? props.number), [layer, head, field, title, props.theme]);
  const name = useId();
  return (
    <div class="map" ref={frame}>
      <canvas
        ref={canvas}
        tabIndex={0}
        role="img"
        data-plot={JSON.stringify(places.plot)}
        style={{ touchAction: at[0] > 1 ? "none" : "pan-y" }}
        aria-label={described}
        aria-describedby={`keys-${name}`}
        onClick={click}
        onMouseMove={(event) => {
          setOver(event.buttons ? null : cell(event));
          canvas.current!.style.cursor = labelled(event) ? "pointer" : "";
        }}
        onMouseLeave={() => setOver(null)}
        onKeyDown={pressed}
      />
      <span class="unseen" id={`keys-${name}`}>{texts.map.keys}</span>
      {over?.layer === layer && <Tooltip {...props} {...over} tile={tile} />}
      {failed ? <p class="hint" role="status">{failed}</p> : tile && <p class="hint exact" role="status">{texts.map.sight(isExact(tile), tile.queries, tile.keys, oneOf(layer, tile.window))}</p>}
      {tile && <Closeness layer={layer} head={props.number} window={tile.window} />}
      {props.exports && (
        <p class="tools">
          <FigureMenu of={texts.figures.map(title)} make={(paper) => mapFigure({ name: props.exports!, title, about: props.about ?? "", layer, field, scale: props.scale, colours: props.colours, at, tile }, paper)} />{" "}
          <button type="button" aria-label={texts.map.zoomIn} onClick={() => closer(2)} aria-disabled={at[0] >= closest}>+</button>{" "}
          <button type="button" aria-label={texts.map.zoomOut} onClick={() => closer(0.5)} aria-disabled={at[0] === 1}>−</button>{" "}
          <button type="button" onClick={() => zoom.change([1, 0.5, 0.5])} aria-disabled={at[0] === 1}>{texts.map.reset}</button>
        </p>
      )}
    </div>
  );
}

/** The cell under the pointer: its bin, the place as shares of keys and queries, and in pixels of the window. */
interface Hit {
  layer: Layer;
  row: number;
  column: number;
  across: number;
  down: number;
  x: number;
  y: number;
}

/** The tile of the visible part once the map rests, if a server or the page itself has it; or why it failed. */
function useTile({ layer, number, field, window: alone = null }: Props, at: Zoom["at"]): { tile: Tile | null; failed: string } {
  const [found, setFound] = useState<Tile | null>(null);
  const [failed, setFailed] = useState("");
  const needed = number !== undefined && served(layer, number, alone) && !layer.map?.exact && !field.sink && !field.signed && (at[0] > 1 || alone !== null);
  const [k, x, y] = at;
  useEffect(() => {
    setFailed("");
    if (!needed) return setFound(null);
    const part = (middle: number, length: number): [number, number] => {
      const from = Math.min(1 - 1 / k, Math.max(0, middle - 0.5 / k));
      return [Math.floor(from * length), Math.min(length, Math.ceil((from + 1 / k) * length))];
    };
    const stop = new AbortController();
    const later = setTimeout(() => {
      const [queries, keys] = served(layer, number, alone)!;
      askTile(layer, number, part(y, queries), part(x, keys), stop.signal, alone).then(setFound, (error: unknown) => {
        if (!stop.signal.aborted) setFailed(why(error));
      });
    }, 150);
    return () => {
      clearTimeout(later);
      stop.abort();
    };
  }, [needed, layer.index, number, alone, k, x, y]);
  return { tile: needed && found?.layer === layer.index && found.head === number && found.window === alone ? found : null, failed };
}

/** Below and right of the pointer, or above and left where the window ends. */
function Tooltip({ x, y, tile, across, down, ...rest }: Props & Hit & { tile: Tile | null }) {
  const box = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const { style, offsetWidth, offsetHeight } = box.current!;
    const fit = (at: number, size: number, room: number) => `${at + 14 + size <= room ? at + 14 : Math.max(0, at - 14 - size)}px`;
    style.left = fit(x, offsetWidth, document.documentElement.clientWidth);
    style.top = fit(y, offsetHeight, innerHeight);
  });
  return (
    <div class="tip" role="tooltip" ref={box}>
      {(tile && <Finer layer={rest.layer} tile={tile} across={across} down={down} />) || <Cell {...rest} />}
    </div>
  );
}

/** The row and column of a tile at a place, as shares of keys and queries; null outside of it. */
function cellOf(tile: Tile, across: number, down: number): [number, number] | null {
  const [queries, keys] = tile.lengths;
  const [query, key] = [down * queries - tile.queries[0], across * keys - tile.keys[0]];
  const [high, wide] = [tile.queries[1] - tile.queries[0], tile.keys[1] - tile.keys[0]];
  if (query < 0 || key < 0 || query >= high || key >= wide) return null;
  return [Math.floor((query / high) * tile.rows), Math.floor((key / wide) * tile.columns)];
}

/** The weight of a query on a key, from the server or from q and k in the page. */
export function Exact({ layer, head, at: [query, key], window }: { layer: Layer; head: number; at: [number, number]; window: number | null }) {
  const [found, setFound] = useState<Tile | null>(null);
  useEffect(() => {
    const stop = new AbortController();
    void askTile(layer, head, [query, query + 1], [key, key + 1], stop.signal, window).then(setFound, () => setFound(null)); // the map shows the reason
    return () => stop.abort();
  }, [layer, head, query, key, window]);
  return found && <Finer layer={layer} tile={found} across={(found.keys[0] + 0.5) / found.lengths[1]} down={(found.queries[0] + 0.5) / found.lengths[0]} />;
}

/** A cell of a tile; null outside of it. */
function Finer({ layer, tile, across, down }: { layer: Layer; tile: Tile; across: number; down: number }) {
  const at = cellOf(tile, across, down);
  if (!at) return null;
  const [row, column] = at;
  const [high, wide] = [tile.queries[1] - tile.queries[0], tile.keys[1] - tile.keys[0]];
  const n = row * tile.columns + column;
  const place = (axis: "query" | "key", at: number, bins: number, length: number, first: number) => {
    const [start, stop] = range(at, bins, length);
    return stop - start === 1 ? texts.names.one(axis, position(layer, axis, first + start, tile.window)) : texts.names.several(axis, first + start, first + stop - 1);
  };
  const mean = tile.mean[n];
  return (
    <span class="cell">
      {fill(texts.cell.arrow, { query: <bdi>{place("query", row, tile.rows, high, tile.queries[0])}</bdi>, key: <bdi>{place("key", column, tile.columns, wide, tile.keys[0])}</bdi> })}
      {mean !== mean ? <span>{texts.cell.maskedTile}</span> : isExact(tile)
        ? <span>{fill(texts.cell.exactWeight, { weight: <b>{figure(mean)}</b> })}</span>
        : <span>{fill(texts.cell.pooled, { mean: <b>{figure(mean)}</b>, max: <b>{figure(tile.max[n])}</b> })}</span>}
    </span>
  );
}

/** A cell of the map: query, key, and its weights. */
export function Cell({ layer, head, field, row, column }: Pick<Props, "layer" | "head" | "field"> & { row: number; column: number }) {
  const n = row * field.columns + column;
  const map = head.map!;
  const where = fill(texts.cell.arrow, { query: <bdi>{bin(layer, "query", row)}</bdi>, key: <bdi>{bin(layer, "key", column)}</bdi> });
  if (map.mean[n] !== map.mean[n]) {
    return <span class="cell">{fill(texts.cell.masked(layer.broken.some(Boolean)), { where })}</span>;
  }
  const shown = field.values[n];
  const changed = shown !== (field.pool === "max" ? map.max[n] : map.mean[n]);
  const note = field.signed
    ? texts.cell.difference(mapValue(shown, layer))
    : shown !== shown ? texts.cell.hidden : texts.cell.rescaled(mapValue(shown, layer));
  const at = argmax(layer, head, row, column);
  return (
    <span class="cell">
      {where}
      {layer.map!.exact
        ? <span>{fill(texts.cell.weight, { weight: <b>{mapValue(map.mean[n], layer)}</b> })}</span>
        : <span>{fill(at ? texts.cell.pooledAt : texts.cell.pooled, { mean: <b>{mapValue(map.mean[n], layer)}</b>, max: <b>{mapValue(map.max[n], layer)}</b>, at: <bdi>{at}</bdi> })}</span>}
      {changed && <span>{note}</span>}
    </span>
  );
}
