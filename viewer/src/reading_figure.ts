// The text with lines as a figure.

import { token } from "./data";
import { type Figure, measured, origin, type Paper, SMALL } from "./figure";
import { titled } from "./figures";
import { bestPattern } from "./grid";
import { curve, FAINTEST, inText, isBlank, MOST_LINES, OVERVIEW, type Pair, type Place, roomOf, type Spot, strengths, wordsOf } from "./reading_lines";
import type { State } from "./state";
import { figures, names, percent } from "./texts";
import { nameOf } from "./words";

const WIDE = 640; // units of a line
const TALL = 17; // of a token
const SIZE = 12; // of its letters
const SCALE = SIZE / 16; // beside the letters on the screen

export interface Drawing {
  places: Place[];
  start: number;
  stop: number;
  kept: number | null;
  toward: State["toward"];
  pairs: Pair[][];
  cut: boolean; // more weights than lines
}

export function textFigure({ places, start, stop, kept, toward, pairs, cut }: Drawing, { inks }: Paper): Figure {
  const chips: { x: number; y: number; width: number; text: string }[] = [];
  let [x, line] = [0, 0];
  for (const word of wordsOf(start, stop)) {
    const texts = word.map((at) => isBlank(token(at) ?? "") ? token(at)! : inText(token(at) ?? ""));
    const widths = texts.map((text) => Math.min(WIDE, Math.max(4, measured(text, SIZE) + 1)));
    if (x > 0 && x + widths.reduce((sum, width) => sum + width, 0) > WIDE) [x, line] = [0, line + 1];
    texts.forEach((text, n) => {
      chips.push({ x, y: line, width: widths[n], text });
      x += widths[n];
    });
  }
  const wide = chips.reduce((most, chip) => Math.max(most, chip.x + chip.width), 0);
  const room = Math.round(SCALE * roomOf(line + 1, wide / SCALE));
  const first = room + 2 * places.length;
  for (const chip of chips) chip.y = first + chip.y * (room + TALL);
  const titles = places.map(([layer, head]) => names.title(nameOf(layer, head)));
  const legend = places.length > 1 ? 20 : 0;
  const height = first + line * (room + TALL) + TALL + legend + 4;
  const width = wide;
  const spot = (position: number) => chips[position - start] && { x: chips[position - start].x + chips[position - start].width / 2, y: chips[position - start].y + legend, height: TALL };
  const shown = pairs.map((each) => each.filter(({ query, key }) => spot(query) && spot(key)));
  return {
    name: `headscope-reading-${places.map((place) => place.join(".")).join("-")}`,
    title: places.length === 1 ? titled(nameOf(...places[0]), bestPattern({ layer: places[0][0], head: places[0][1] })) : titles.join(" · "),
    caption: [
      ...origin(), figures.tokens(start, stop),
      kept === null ? figures.linesOfAll(percent(OVERVIEW), cut ? MOST_LINES : null) : figures.linesOfOne(names.quoted(kept, token(kept, true)!), toward, percent(FAINTEST)),
    ],
    body: {
      width, height, plot: { x: 0, y: 0, width, height },
      draw(surface, left, top) {
        if (legend) {
          let at = left;
          titles.forEach((name, n) => {
            surface.box({ x: at, y: top + 2, width: 10, height: 10 }, inks.lines[n]);
            surface.text(name, at + 14, top + 7, { fill: inks.ink, anchor: "start", size: SMALL });
            at += measured(name) + 32;
          });
        }
        strengths(shown, kept).forEach((weights, position) => {
          const { x, y, width } = chips[position - start];
          weights.forEach((p, n) => p > 0 && surface.box({
            x: left + x, y: top + y + legend + (n * TALL) / weights.length, width, height: TALL / weights.length,
          }, blended(inks.lines[n], inks.ground, 0.1 + 0.6 * p)));
        });
        shown.forEach((each, n) => each.forEach(({ query, key, p }) => {
          const shifted = ({ x, y, height }: Spot) => ({ x: x + left, y: y + top, height });
          if (query !== key) surface.curve(curve(shifted(spot(query)!), shifted(spot(key)!), n, room, wide), inks.lines[n], 0.8 + 3.5 * p, 0.25 + 0.75 * Math.min(1, p));
        }));
        chips.forEach(({ x, y, width, text }, n) => {
          if (start + n === kept) surface.frame({ x: left + x, y: top + y + legend, width, height: TALL }, inks.ink, 1.5);
          const spaced = text.startsWith(" "); // a space at the beginning of a text is none in SVG
          surface.text(text.trimStart(), left + x + (spaced ? width : 0), top + y + legend + TALL / 2, { fill: inks.ink, anchor: spaced ? "end" : "start", size: SIZE });
        });
      },
    },
    bar: null,
  };
}

/** So much of a colour over another one; both as #rrggbb. */
function blended(over: string, under: string, share: number): string {
  const part = (of: string, n: number) => parseInt(of.slice(1 + 2 * n, 3 + 2 * n), 16);
  return `#${[0, 1, 2].map((n) => Math.round(share * part(over, n) + (1 - share) * part(under, n)).toString(16).padStart(2, "0")).join("")}`;
}
