// The page: which view is shown, the switches, the address, the keyboard.

import { render } from "preact";
import { useCallback, useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { Cards } from "./cards";
import { Compare } from "./compare";
import { data } from "./data";
import { all, Exports, Grid, type Place, TILE } from "./grid";
import { HeadView, opened, stepped } from "./head";
import { Found } from "./found";
import { NumberField } from "./number";
import { Reading } from "./reading";
import { SegmentView } from "./segments";
import { Search } from "./search";
import { useScreen } from "./screen";
import { address, parse, SINK, type State, VIEWS, type View } from "./state";
import { Table } from "./table";
import { averageOver, controls, type FirstColumn, grid, tabs, themes } from "./texts";
import { Trace } from "./trace";
import { statistic } from "./words";
import "./style.css";

const THEMES = { "": themes.auto, light: themes.light, dark: themes.dark };

function App() {
  const [state, setState] = useState<State>(() => parse(location.hash));
  const [theme, setTheme] = useState<keyof typeof THEMES>("");
  // another row or column ends the selection of a single query and key
  const change = useCallback((part: Partial<State>) => setState((before) => ({ ...before, ...("row" in part || "column" in part ? { cell: null } : {}), ...part })), []);
  const drawn = `${theme} ${useScreen()}`; // what is drawn is drawn again when this changes
  const focus = useRef("");
  const open = (place: Place, part: Partial<State> = {}) => {
    focus.current = "#head-title";
    change({ view: "head", ...opened(state, place.layer, place.head), ...part });
  };
  // What was clicked is gone, and the focus with it.
  useLayoutEffect(() => {
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
      if (/^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName) || target.closest?.(".scroll, [role=tablist]")) return;
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

  const pick = (to: keyof typeof THEMES) => {
    if (to) document.documentElement.dataset.theme = to;
    else delete document.documentElement.dataset.theme;
    setTheme(to);
  };
  return (
    <>
      <Tabs view={state.view} show={(view) => change({ view })} />
      <Search {...{ state, change }} />
      <Switches {...{ state, change, theme, pick }} />
      <div id="view" role="tabpanel" aria-labelledby={`tab-${state.view}`}>
        {state.view === "heads" && <Cards {...{ state, change, open }} />}
        {state.view === "heads" && (
          <section aria-labelledby="heads-title">
            <h2 id="heads-title">{grid.title}</h2>
            <div class="hint">
              {gridHint(state)}{" "}
              {HAS_MAPS && <Exports state={state} />}
              <details class="help">
                <summary aria-label={grid.help}>?</summary>
                <p>{grid.keys} {HAS_MAPS && (data.image ? grid.pictures : grid.axes)}</p>
              </details>
            </div>
            <Grid {...{ state, theme: drawn, open }} />
          </section>
        )}
        {state.view === "head" && <HeadView {...{ state, theme: drawn, change }} />}
        {state.view === "reading" && <Reading {...{ state, theme: drawn, change }} />}
        {state.view === "segments" && <SegmentView {...{ state, change, open }} />}
        {state.view === "compare" && <Compare {...{ state, theme: drawn, change }} />}
        {state.view === "found" && <Found />}
        {state.view === "trace" && <Trace />}
        {state.view === "table" && <Table {...{ state, change, open }} />}
      </div>
    </>
  );
}

function Tabs({ view, show }: { view: View; show: (view: View) => void }) {
  const pressed = (event: KeyboardEvent) => {
    const at = VIEWS.findIndex(([name]) => name === view);
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: -1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const [to] = VIEWS[(next + VIEWS.length) % VIEWS.length];
    show(to);
    document.getElementById(`tab-${to}`)!.focus();
  };
  return (
    <div role="tablist" aria-label={tabs.label} onKeyDown={pressed}>
      {VIEWS.map(([name, text]) => (
        <button key={name} type="button" role="tab" id={`tab-${name}`} aria-selected={view === name} aria-controls="view"
          tabIndex={view === name ? 0 : -1} onClick={() => show(name)}>{text}</button>
      ))}
    </div>
  );
}

/** The statistics that some head has. */
const KNOWN = data.names.filter(({ name }) => all().some(({ layer, head }) => statistic(layer, head, name) !== null));

interface SwitchesProps {
  state: State;
  change: (part: Partial<State>) => void;
  theme: keyof typeof THEMES;
  pick: (to: keyof typeof THEMES) => void;
}

function Switches({ state, change, theme, pick }: SwitchesProps) {
  const maps = data.layers.some((layer) => layer.map) && ["heads", "head", "compare"].includes(state.view);
  const pooled = data.layers.some((layer) => layer.map && !layer.map.exact);
  const many = state.view === "heads" || state.view === "table";
  const names: [string, string][] = KNOWN.map(({ name, heading }) => [name, heading]);
  if (data.patterns.length > 0) names.unshift(["score", controls.score]);
  return (
    <div class="switches">
      {data.image && maps && state.view === "heads" && (
        <Select label={controls.thumbs} value={state.thumbs} options={[["received", averageOver(data.image.special)], ["patch", controls.thumbsSelected], ["map", controls.thumbsMap]]} choose={(thumbs) => change({ thumbs })} />
      )}
      {data.image && maps && state.view !== "compare" && (
        <label><input type="checkbox" checked={state.over} onChange={(event) => change({ over: event.currentTarget.checked })} /> {controls.overlay}</label>
      )}
      {maps && (
        <>
          {pooled && <Select label={controls.pool} value={state.pool} options={[["mean", controls.pools.mean], ["max", controls.pools.max]]} choose={(pool) => change({ pool })} />}
          <Select label={controls.scale} value={state.scale} options={[["linear", controls.scales.linear], ["log", controls.scales.log]]} choose={(scale) => change({ scale })} />
          <Select label={controls.colours} value={state.colours} options={[["viridis", "viridis"], ["cividis", "cividis"], ["magma", "magma"]]} choose={(colours) => change({ colours })} />
          {SINK && <label title={controls.hideHelp(FIRST_COLUMN)}>
            <input type="checkbox" checked={state.sink} onChange={(event) => change({ sink: event.currentTarget.checked })} /> {controls.hide(FIRST_COLUMN)}
          </label>}
        </>
      )}
      {many && (
        <>
          <Select label={controls.sort} value={state.sort} options={[["", controls.sortLayer], ...names]} choose={(sort) => change({ sort })} />
          {state.sort && <Select label={controls.order} value={state.down ? "1" : ""} options={[["1", controls.largest], ["", controls.smallest]]} choose={(down) => change({ down: down !== "" })} />}
          {data.patterns.length > 0 && (
            <Select label={controls.pattern} value={state.pattern} options={[["", controls.anyPattern], ...Object.keys(data.patternWords).map((name): [string, string] => [name, name])]} choose={(pattern) => change({ pattern })} />
          )}
          <Select label={controls.filter} value={state.by} options={[["", controls.anyStatistic], ...names]} choose={(by) => change({ by })} />
          {state.by && (
            <label>
              <select aria-label={controls.atLeast} value={state.under ? "1" : ""} onChange={(event) => change({ under: event.currentTarget.value !== "" })}>
                <option value="">≥</option>
                <option value="1">≤</option>
              </select>
              <NumberField label={controls.limit} step="any" value={state.least} set={(least) => change({ least })} clear={() => change({ least: null })} />
            </label>
          )}
        </>
      )}
      <Select label={themes.label} value={theme} options={Object.entries(THEMES) as [keyof typeof THEMES, string][]} choose={pick} />
    </div>
  );
}

function headingOf(name: string): string {
  return data.names.find((each) => each.name === name)?.heading ?? name;
}

/** The content of the first column of the maps. */
const FIRST_COLUMN: FirstColumn = data.image ? "CLS" : data.layers.every((layer) => !layer.map || (layer.lengths && layer.map.columns === layer.lengths[1])) ? "token" : "bin";

const HAS_MAPS = data.layers.some((layer) => layer.map);

/** The sentence above the heads. */
function gridHint(state: State): string {
  if (!HAS_MAPS) return `${grid.click} ${grid.noMap(headingOf(state.sort || TILE))}`;
  return `${grid.click} ${data.image ? grid.ownScale.image : grid.ownScale.map}`;
}

function Select<T extends string>({ label, value, options, choose }: { label: string; value: T; options: [T, string][]; choose: (to: T) => void }) {
  return (
    <label>
      {label}{" "}
      <select value={value} onChange={(event) => choose(event.currentTarget.value as T)}>
        {options.map(([name, text]) => <option key={name} value={name}>{text}</option>)}
      </select>
    </label>
  );
}

const root = document.getElementById("viewer")!;
root.replaceChildren();
root.dataset.source = __SOURCE__;
render(<App />, root);
