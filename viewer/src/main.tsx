// The page: which view is shown, the switches, the address, the keyboard.

import { render } from "preact";
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { BandLegend, hasBands } from "./bands";
import { HAS_MAPS, type Theme, TopBar } from "./bar";
import { Cards } from "./cards";
import { ChangesView, ChangeView } from "./changes";
import { Compare } from "./compare";
import { data, HAS_READING } from "./data";
import { coloursOf, FEW_CELLS, hasQuantile } from "./field";
import { all, chosen, Exports, Grid, type Place, TILE } from "./grid";
import { HeadView, opened, stepped } from "./head";
import { AlarmTable, History } from "./history";
import { HeadTip } from "./head_tip";
import { useHost } from "./host";
import { languageOf, say, speak } from "./languages";
import { Found } from "./found";
import { Glossary } from "./glossary";
import { keyName, queryOf } from "./picture";
import { MissingView } from "./missing";
import { Offered, useDrop } from "./offer";
import { Reading } from "./reading";
import { WindowReading } from "./reading_windows";
import { SegmentView } from "./segments";
import { isDark, useScreen } from "./screen";
import { present, WhoseHeads } from "./shown_side";
import { address, parse, type State } from "./state";
import { Table } from "./table";
import { controls, grid, image } from "./texts";
import { Tour } from "./tour";
import { Trace } from "./trace";
import { ending, windowsOf, withoutFirst } from "./words";
import "./style.css";

function App() {
  const [state, setState] = useState<State>(() => parse(location.hash));
  const [theme, setTheme] = useState<Theme>("");
  const [drawnHead, setDrawnHead] = useState<Place>(state);
  // another row, column or window ends the selection of a single query and key
  const change = useCallback((part: Partial<State>) => setState((before) => ({ ...before, ...("row" in part || "column" in part || "window" in part ? { cell: null } : {}), ...part })), []);
  const language = languageOf(state.lang);
  speak(language);
  const side = present(state);
  const drawn = `${theme} ${language} ${side} ${useScreen()}`; // what is drawn is drawn again when this changes
  const dark = isDark(theme);
  // what is drawn: the address keeps the name of the palette, its colours are those of a light or a dark page
  const shown = useMemo(() => ({ ...state, colours: coloursOf(state.colours, dark) }), [state, dark]);
  useHost(state, change);
  useDrop({ state, change });
  const focus = useRef("");
  const open = (place: Place, part: Partial<State> = {}) => {
    focus.current = "#head-title";
    change({ view: "head", ...opened(state, place.layer, place.head), ...part });
  };
  const before = useRef(state.view);
  // What was clicked is gone, and the focus with it. Another view begins at its top.
  useLayoutEffect(() => {
    if (before.current !== state.view) scrollTo(0, 0);
    before.current = state.view;
    if (focus.current) document.querySelector<HTMLElement>(focus.current)?.focus();
    focus.current = "";
  }, [state.view]);

  const written = useRef(location.hash);
  const last = useRef(state);
  const later = useRef(0);
  // A layout effect: one that waits for the next frame would write what was shown before Back over what Back has reached.
  useLayoutEffect(() => {
    if (location.protocol === "about:") return; // in the frame of a notebook, which has no address of its own
    if (last.current.view !== state.view) { // Back leads to the view before, as it was left
      history.replaceState(null, "", address(last.current));
      history.pushState(null, "", (written.current = address(state)));
    }
    last.current = state;
    later.current = window.setTimeout(() => {
      written.current = address(state);
      if (location.hash !== written.current) history.replaceState(null, "", written.current);
    }, 150);
    return () => clearTimeout(later.current);
  }, [state]);
  useEffect(() => {
    const moved = () => {
      if (location.hash === written.current) return;
      clearTimeout(later.current);
      written.current = location.hash;
      setState((last.current = parse(written.current)));
    };
    const events = ["popstate", "hashchange"]; // popstate comes with the other entry, hashchange later
    for (const name of events) addEventListener(name, moved);
    return () => events.forEach((name) => removeEventListener(name, moved));
  }, []);

  // A layout effect is there with what is shown: a key pressed before the next frame would find the state of the last.
  useLayoutEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      if (state.view !== "head" || event.shiftKey || event.ctrlKey || event.altKey || event.metaKey) return;
      if (/^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName) || target.closest?.(".scroll, [role=tablist], .panel")) return;
      if (event.key === "Escape") {
        focus.current = ".thumb.opened, .thumb[tabindex='0']";
        return change({ view: "heads" });
      }
      const [down, across] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] ?? [0, 0];
      const to = stepped(state, down, across);
      if (!to) return;
      event.preventDefault();
      change(to);
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, [state, change]);

  const pick = (to: Theme) => {
    if (to) document.documentElement.dataset.theme = to;
    else delete document.documentElement.dataset.theme;
    setTheme(to);
  };
  return (
    <>
      <TopBar title={say(TITLE, true)} lead={say(LEAD)} drawn={drawnHead} {...{ state, change, theme, pick }} />
      <main id="viewer" data-source={__SOURCE__}>
        {NOTES.map((note, n) => <p class={/NaN|infinity/.test(note) ? "note" : "noted"} key={n}>{say(note)}</p>)}
        <MissingView view={state.view} />
        <Offered {...{ state, change }} />
        <WhoseHeads {...{ state, change }} />
        <div id="view" key={side} role="tabpanel" aria-labelledby={`tab-${state.view === "change" ? "changes" : state.view}`}>
          {state.view === "history" && <History {...{ state: shown, theme: drawn, change }} />}
          {state.view === "alarms" && <AlarmTable {...{ change }} />}
          {state.view === "changes" && <ChangesView {...{ state: shown, theme: drawn, change }} />}
          {state.view === "change" && <ChangeView {...{ state: shown, theme: drawn, change }} />}
          {state.view === "heads" && <Cards {...{ state, change, open }} theme={drawn} />}
          {state.view === "heads" && (
            <section aria-labelledby="heads-title">
              <h2 id="heads-title" class="unseen">{grid.title}</h2>
              <div class="hint">{gridHint(state)} <ShowAll {...{ state, change }} /> {HAS_MAPS && <Exports state={shown} />}</div>
              {BANDED && <BandLegend layer={BANDED} />}
              <Grid {...{ state: shown, theme: drawn, open }} />
            </section>
          )}
          {state.view === "head" && <HeadView {...{ state: shown, theme: drawn, change, drawn: setDrawnHead }} />}
          {state.view === "reading" && (HAS_READING ? <Reading {...{ state: shown, theme: drawn, change }} /> : <WindowReading {...{ state: shown, theme: drawn, change }} />)}
          {state.view === "segments" && <SegmentView {...{ state: shown, change, open }} />}
          {state.view === "compare" && <Compare {...{ state: shown, theme: drawn, change }} />}
          {state.view === "found" && <Found />}
          {state.view === "trace" && <Trace />}
          {state.view === "table" && <Table {...{ state, change, open }} />}
        </div>
      </main>
      <HeadTip />
      <Tour {...{ state, change }} />
      <Glossary />
    </>
  );
}

/** Ends the filters. The button then disappears, so a head gets the focus. */
function ShowAll({ state, change }: { state: State; change: (part: Partial<State>) => void }) {
  if (chosen(state).length === all().length) return null;
  const show = () => {
    change({ pattern: "", by: "", least: null, under: false });
    requestAnimationFrame(() => document.querySelector<HTMLElement>(".thumb[tabindex='0']")?.focus({ preventScroll: true }));
  };
  return <button type="button" class="show-all" onClick={show}>{grid.showAll}</button>;
}

/** A layer whose segments are bands along its maps. */
const BANDED = data.layers.find(hasBands);

function headingOf(name: string): string {
  return data.names.find((each) => each.name === name)?.heading ?? name;
}

/** The sentence above the heads. */
function gridHint(state: State): string {
  const pooled = data.layers.some(({ map }) => map && !map.exact);
  const windows = Math.max(1, ...data.layers.map(windowsOf));
  const scale = !HAS_MAPS ? grid.noMap(headingOf(state.sort || TILE)) : grid.ownScale(data.image ? "image" : "map", controls.scales[state.scale], state.pool === "max" && pooled ? windows : 0, pooled ? windows : 0);
  const many = !data.image && data.layers.find(({ map }) => map && hasQuantile(map))?.map;
  const [found, heads] = [chosen(state).length, all().length];
  const shown = data.image && HAS_MAPS && (state.thumbs === "patch" ? image.shownOf.patch(keyName(queryOf(state, state.layer, state.head))) : image.shownOf[state.thumbs]);
  const first = data.layers.find(({ map }) => map);
  const order = state.sort && grid.sorted(state.sort === "score" ? controls.score : headingOf(state.sort), state.down);
  return [grid.click, order, shown, scale, many && ending(many, FEW_CELLS), first && withoutFirst(first, state), found < heads && grid.matching(found, heads)].filter(Boolean).join(" ");
}

/** A text of the page as it is without the script. */
function written(selector: string): string {
  return page.querySelector(selector)?.textContent ?? "";
}

const page = document.getElementById("page")!;
const TITLE = written("h1");
const LEAD = written(".lead");
const NOTES = [...page.querySelectorAll(".note")].map((note) => note.textContent ?? "");
page.replaceChildren();
render(<App />, page);
