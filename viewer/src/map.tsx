// The map of a head on a canvas: zoom, pan, a tooltip, and a cell that can be pinned.

import { select } from "d3-selection";
import { zoom as zooming, zoomIdentity, type ZoomTransform } from "d3-zoom";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Head, Layer } from "./data";
import { draw, geometry, type Inks, type Scene, type Sight } from "./draw";
import { type Colours, type Field, Pictures, type Scale } from "./field";
import { CanvasSurface, SvgSurface } from "./surface";
import { argmax, bin, figure } from "./words";

export interface Zoom {
  at: [number, number, number];
  change: (at: [number, number, number]) => void;
}

interface Props {
  layer: Layer;
  head: Head;
  field: Field;
  scale: Scale;
  colours: Colours;
  zoom: Zoom;
  row: number | null;
  column: number | null;
  pin: (row: number | null, column: number | null) => void;
  most: number;
  title: string;
  theme: string;
  exports?: string; // the name of files
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

/** What is seen, from the scale and the middle as shares. */
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

export function MapView(props: Props) {
  const { layer, head, field, zoom, most, title, pin } = props;
  const frame = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const behaviour = useRef<ReturnType<typeof zooming<HTMLCanvasElement, unknown>> | null>(null);
  const [width, setWidth] = useState(0);
  // While it moves the map alone is drawn; the rest of the page hears of it once it rests.
  const [at, setAt] = useState(zoom.at);
  const resting = useRef(0);
  useEffect(() => setAt(zoom.at), [zoom.at]);
  const told = useRef(zoom.change);
  told.current = zoom.change;
  const move = (to: Zoom["at"]) => {
    setAt(to);
    clearTimeout(resting.current);
    resting.current = setTimeout(() => told.current(to), 120);
  };
  const [over, setOver] = useState<{ row: number; column: number; x: number; y: number } | null>(null);
  const pictures = useMemo(() => new Pictures(field, props.scale, props.colours), [field, props.scale, props.colours]);
  const places = useMemo(() => geometry(Math.max(width, 240), most, layer), [width, most, layer]);
  const side = places.plot.width;
  const scene = useRef<Scene | null>(null);
  const colours = useMemo(inks, [props.theme]);
  scene.current = {
    layer, head, field, pictures, geometry: places, inks: colours, ratio: window.devicePixelRatio || 1,
    sight: sightOf(at, side), row: props.row, column: props.column,
  };

  useLayoutEffect(() => {
    const watcher = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    watcher.observe(frame.current!);
    return () => watcher.disconnect();
  }, []);

  useLayoutEffect(() => {
    const element = canvas.current!;
    const { ratio } = scene.current!;
    element.width = Math.round(places.width * ratio);
    element.height = Math.round(places.height * ratio);
    element.style.width = `${places.width}px`;
    element.style.height = `${places.height}px`;
  }, [places]);

  useLayoutEffect(() => {
    const context = canvas.current!.getContext("2d")!;
    const { ratio } = scene.current!;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    draw(new CanvasSurface(context), scene.current!);
  });

  useEffect(() => {
    const { plot } = places;
    const area: [[number, number], [number, number]] = [[plot.x, plot.y], [plot.x + side, plot.y + side]];
    const made = zooming<HTMLCanvasElement, unknown>()
      .scaleExtent([1, Math.max(8, Math.max(field.rows, field.columns) / 4)])
      .extent(area)
      .translateExtent(area)
      .clickDistance(4)
      // with all in sight, a wheel turned to see more scrolls the page
      .filter((event: MouseEvent | WheelEvent) =>
        !event.button && !(event.type === "wheel" && (event as WheelEvent).deltaY > 0 && scene.current!.sight.k <= 1))
      .on("zoom", (event: { transform: ZoomTransform; sourceEvent: Event | null }) => {
        if (!event.sourceEvent) return; // set from outside
        const { k } = event.transform;
        const [x, y] = event.transform.invert([plot.x + side / 2, plot.y + side / 2]);
        move([k, (x - plot.x) / side, (y - plot.y) / side]);
      });
    const selected = select(canvas.current!);
    selected.call(made).on("dblclick.zoom", null);
    behaviour.current = made;
    return () => void selected.on(".zoom", null);
  }, [places, field.rows, field.columns]);

  useEffect(() => {
    const { plot } = places;
    const { k, x, y } = sightOf(zoom.at, side);
    const transform = zoomIdentity.translate(x + plot.x * (1 - k), y + plot.y * (1 - k)).scale(k);
    if (behaviour.current) select(canvas.current!).call(behaviour.current.transform, transform);
  }, [zoom.at, places, field.rows, field.columns]);

  const cell = (event: MouseEvent) => {
    const box = canvas.current!.getBoundingClientRect();
    const { plot } = places;
    const { sight } = scene.current!;
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const column = Math.floor(((x - plot.x - sight.x) / sight.k / side) * field.columns);
    const row = Math.floor(((y - plot.y - sight.y) / sight.k / side) * field.rows);
    const inside = x >= plot.x && y >= plot.y && x <= plot.x + side && y <= plot.y + side;
    return inside && column < field.columns && row < field.rows && row >= 0 && column >= 0 ? { row, column, x, y } : null;
  };
  const click = (event: MouseEvent) => {
    const hit = cell(event);
    if (!hit) return;
    const same = hit.row === props.row && hit.column === props.column;
    pin(same ? null : hit.row, same ? null : hit.column);
  };
  const moved = (row: number, column: number) =>
    pin(Math.min(field.rows - 1, Math.max(0, row)), Math.min(field.columns - 1, Math.max(0, column)));
  const closest = Math.max(8, Math.max(field.rows, field.columns) / 4);
  const closer = (by: number) => zoom.change([Math.min(closest, Math.max(1, at[0] * by)), at[1], at[2]]);
  const pressed = (event: KeyboardEvent) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (step && event.shiftKey) moved((props.row ?? 0) + step[0], (props.column ?? 0) + step[1]);
    else if (event.key === "+" || event.key === "=") closer(2);
    else if (event.key === "-") closer(0.5);
    else if (event.key === "0") zoom.change([1, 0.5, 0.5]);
    else if (event.key === "Escape") pin(null, null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };

  const png = () => canvas.current!.toBlob((blob) => blob && save(`${props.exports}.png`, blob));
  const svg = () => {
    const surface = new SvgSurface();
    draw(surface, scene.current!);
    save(`${props.exports}.svg`, new Blob([surface.written(places.width, places.height, title)], { type: "image/svg+xml" }));
  };

  return (
    <div class="map" ref={frame}>
      <canvas
        ref={canvas}
        tabIndex={0}
        role="img"
        style={{ touchAction: at[0] > 1 ? "none" : "pan-y" }}
        aria-label={`${title}. Shift and arrow keys move the pinned cell, plus and minus zoom, 0 shows all.`}
        onClick={click}
        onMouseMove={(event) => setOver(event.buttons ? null : cell(event))}
        onMouseLeave={() => setOver(null)}
        onKeyDown={pressed}
      />
      {over && <Tooltip {...props} {...over} />}
      {props.exports && (
        <p class="tools">
          <button type="button" onClick={png}>PNG</button> <button type="button" onClick={svg}>SVG</button>{" "}
          <button type="button" aria-label="Closer" onClick={() => closer(2)} disabled={at[0] >= closest}>+</button>{" "}
          <button type="button" aria-label="Farther" onClick={() => closer(0.5)} disabled={at[0] === 1}>−</button>{" "}
          <button type="button" onClick={() => zoom.change([1, 0.5, 0.5])} disabled={at[0] === 1}>Show all</button>
        </p>
      )}
    </div>
  );
}

function Tooltip({ x, y, ...rest }: Props & { row: number; column: number; x: number; y: number }) {
  return (
    <div class="tip" role="tooltip" style={{ left: `${Math.max(0, Math.min(x + 14, window.innerWidth - 280))}px`, top: `${y + 14}px` }}>
      <Cell {...rest} />
    </div>
  );
}

/** All that is known of a bin. */
export function Cell({ layer, head, field, row, column }: Pick<Props, "layer" | "head" | "field"> & { row: number; column: number }) {
  const n = row * field.columns + column;
  const map = head.map!;
  const where = <><bdi>{bin(layer, "query", row)}</bdi> → <bdi>{bin(layer, "key", column)}</bdi></>;
  if (map.mean[n] !== map.mean[n]) return <span class="cell">{where}: may not be seen</span>;
  const shown = field.values[n];
  const changed = shown !== (field.pool === "max" ? map.max[n] : map.mean[n]);
  const note = field.signed
    ? `difference of the two heads ${figure(shown)}`
    : shown !== shown ? "hidden: the first column" : `without the first column ${figure(shown)}`;
  const at = argmax(layer, head, row, column);
  return (
    <span class="cell">
      {where}
      {layer.map!.exact
        ? <span>weight <b>{figure(map.mean[n])}</b></span>
        : <span>mean <b>{figure(map.mean[n])}</b>, max <b>{figure(map.max[n])}</b>{at && <> at <bdi>{at}</bdi></>}</span>}
      {changed && <span>{note}</span>}
    </span>
  );
}
