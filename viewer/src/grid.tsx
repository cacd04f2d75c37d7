// Every head, layers × heads or in the order of a statistic, each with a small map that is drawn once it comes into sight.

import { useEffect, useRef } from "preact/hooks";
import { data, head as decoded } from "./data";
import { type Colours, colour, field, Pictures } from "./field";
import type { State } from "./state";
import { figure, nameOf, statistic } from "./words";

export interface Place {
  layer: number;
  head: number;
}

/** The figure that stands for a head where no map was recorded. */
export const TILE = data.names.some((each) => each.name === "normalized_entropy") ? "normalized_entropy" : (data.names[0]?.name ?? "");

const WIDEST = Math.max(...data.layers.map((layer) => layer.heads));

export function all(): Place[] {
  return data.layers.flatMap((layer, at) => Array.from({ length: layer.heads }, (_, head) => ({ layer: at, head })));
}

/** The heads that the filters leave, in the order that is asked for; heads without the figure come last. */
export function chosen(state: State): Place[] {
  let found = all();
  if (state.pattern) found = found.filter(({ layer, head }) => data.patterns[layer]?.[head]?.[0]?.[0] === state.pattern);
  if (state.by) {
    found = found.filter(({ layer, head }) => (statistic(layer, head, state.by) ?? -Infinity) >= state.least);
  }
  if (!state.sort) return found;
  const of = ({ layer, head }: Place) => statistic(layer, head, state.sort);
  const sign = state.down ? -1 : 1;
  return found.sort((a, b) => {
    const [x, y] = [of(a), of(b)];
    if (x === null || y === null) return Number(x === null) - Number(y === null);
    return sign * (x - y);
  });
}

export function bestPattern({ layer, head }: Place): string {
  const best = data.patterns[layer]?.[head]?.[0];
  return best ? `${best[0]} ${figure(best[1])}` : "";
}

interface Props {
  state: State;
  theme: string;
  open: (place: Place) => void;
}

export function Grid({ state, theme, open }: Props) {
  const found = chosen(state);
  const element = useRef<HTMLDivElement>(null);
  const key = (event: KeyboardEvent) => {
    const buttons = [...element.current!.querySelectorAll<HTMLButtonElement>("button.thumb")];
    const at = buttons.indexOf(document.activeElement as HTMLButtonElement);
    if (at < 0) return;
    const to = neighbour(buttons, at, event.key);
    if (to === null) return;
    event.preventDefault();
    buttons[to].focus();
  };
  const thumb = (place: Place) => <Thumb key={`${place.layer}.${place.head}`} {...{ place, state, theme, open }} />;
  const rows = state.sort ? [] : data.layers.map((_, layer) => found.filter((place) => place.layer === layer));
  return (
    <div ref={element} onKeyDown={key} style={{ "--heads": String(WIDEST) }}>
      {found.length === 0 && <p class="hint">No head is left by these filters.</p>}
      {state.sort ? (
        <div class="heads">{found.map(thumb)}</div>
      ) : (
        rows.map((row, layer) =>
          row.length > 0 && (
            <div class="layer" key={layer}>
              <h3 title={data.layers[layer].name}>{/^\d+$/.test(data.layers[layer].short) && "layer "}{data.layers[layer].short}</h3>
              <div class="heads">{row.map(thumb)}</div>
            </div>
          ),
        )
      )}
    </div>
  );
}

/** The button that an arrow leads to: the next, or the nearest in the line above or below. */
function neighbour(buttons: HTMLElement[], at: number, key: string): number | null {
  if (key === "ArrowLeft") return Math.max(0, at - 1);
  if (key === "ArrowRight") return Math.min(buttons.length - 1, at + 1);
  if (key !== "ArrowUp" && key !== "ArrowDown") return null;
  const from = buttons[at].getBoundingClientRect();
  const sign = key === "ArrowDown" ? 1 : -1;
  let best: number | null = null;
  let least = Infinity;
  for (let n = at + sign; n >= 0 && n < buttons.length; n += sign) {
    const to = buttons[n].getBoundingClientRect();
    const [down, across] = [Math.abs(to.top - from.top), Math.abs(to.left - from.left)];
    if (down < 1) continue;
    if (down * 1000 + across < least) [best, least] = [n, down * 1000 + across];
    else if (down * 1000 > least) break;
  }
  return best ?? at;
}

function Thumb({ place, state, theme, open }: Props & { place: Place }) {
  const { layer, head } = place;
  const canvas = useRef<HTMLCanvasElement>(null);
  const said = data.layers[layer].map;
  useEffect(() => {
    if (!said) return;
    let stale = false;
    const watcher = new IntersectionObserver(
      ([entry]) => {
        if (!entry.isIntersecting) return;
        watcher.disconnect();
        void decoded(layer, head).then((found) => {
          if (stale || !found.map) return;
          paint(canvas.current!, new Pictures(field(found.map, state.pool, state.sink, said.exact), state.scale, state.colours));
        });
      },
      { rootMargin: "200px" },
    );
    watcher.observe(canvas.current!);
    return () => {
      stale = true;
      watcher.disconnect();
    };
  }, [layer, head, state.pool, state.sink, state.scale, state.colours, theme]);
  const value = state.sort ? statistic(layer, head, state.sort) : null;
  const pattern = bestPattern(place);
  const opened = layer === state.layer && head === state.head;
  const heading = data.names.find((each) => each.name === state.sort)?.heading ?? state.sort;
  return (
    <button
      type="button"
      class={`thumb${opened ? " opened" : ""}`}
      aria-label={`${nameOf(layer, head)}${pattern && `, ${pattern}`}${state.sort && `, ${heading} ${figure(value)}`}`}
      title={`${nameOf(layer, head)}${pattern && `: ${pattern}`}`}
      tabIndex={opened || (layer === 0 && head === 0) ? 0 : -1}
      onClick={() => open(place)}
    >
      {said ? <canvas ref={canvas} /> : <Tile place={place} name={state.sort || TILE} colours={state.colours} />}
      <span>{state.sort ? `${data.layers[layer].short}·${head}` : head}</span>
      {state.sort && <b>{figure(value)}</b>}
    </button>
  );
}

/** Where no map was recorded: the colour of a statistic between the least and the most of all heads. */
function Tile({ place, name, colours }: { place: Place; name: string; colours: Colours }) {
  const values = all().map(({ layer, head }) => statistic(layer, head, name)).filter((value) => value !== null);
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const value = statistic(place.layer, place.head, name);
  const { fill, white } = colour(value === null || most === least ? 0 : (value - least) / (most - least), colours);
  return <i class="tile" style={{ background: value === null ? "none" : fill, color: white ? "white" : "black" }}>{figure(value)}</i>;
}

function paint(canvas: HTMLCanvasElement, pictures: Pictures): void {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = canvas.height = Math.max(1, Math.round(canvas.clientWidth * ratio));
  const context = canvas.getContext("2d")!;
  context.imageSmoothingEnabled = false;
  const { canvas: from } = pictures.fit(canvas.width);
  context.drawImage(from, 0, 0, canvas.width, canvas.height);
  canvas.dataset.drawn = "yes";
}
