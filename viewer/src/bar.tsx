// The bar on top: the title, the views, the head in view, and two menus: how things are shown, and help.

import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { data } from "./data";
import { PALETTES } from "./field";
import { openGlossary } from "./glossary";
import { all } from "./grid";
import { InView } from "./head";
import { type Language, LANGUAGES, languageOf, remember } from "./languages";
import { NumberField } from "./number";
import { Search } from "./search";
import { CompareWith } from "./offer";
import { CopyLink } from "./copy_link";
import { Select } from "./select";
import { SINK, type State, type Tab, type View, views } from "./state";
import { bar, controls, grid, head, help, history, patternNames, regionNames, tabs, themes } from "./texts";
import { startTour } from "./tour";
import { FIRST_COLUMN, statistic } from "./words";

export type Theme = "" | "light" | "dark";

export const HAS_MAPS = data.layers.some((layer) => layer.map);

interface Props {
  state: State;
  change: (part: Partial<State>) => void;
  theme: Theme;
  pick: (to: Theme) => void;
}

/** `title` and `lead` are those of the page without its script; `drawn` is the head whose map is drawn. */
export function TopBar({ title, lead, drawn, ...rest }: Props & { title: string; lead: string; drawn: { layer: number; head: number } }) {
  const { state, change } = rest;
  return (
    <header class="topbar">
      <h1 title={title}><bdi>{title}</bdi></h1>
      <Tabs view={state.view === "change" ? "changes" : state.view} against={state.against} show={(view) => change({ view })} />
      {state.view === "head" && <InView {...{ drawn, state, change }} />}
      <div class="menus">
        <CompareWith {...{ state, change }} />
        <Search {...{ state, change }} />
        <Menu name="help" label={bar.help} mark="?">
          <p class="guides">
            <button type="button" class="close-menu" onClick={startTour}>{help.takeTour}</button>{" "}
            <button type="button" class="close-menu" aria-haspopup="dialog" onClick={() => openGlossary()}>{help.glossary}</button>
          </p>
          <h2>{help.page}</h2>
          {lead && <p>{lead}</p>}
          {state.view === "heads" && <p>{grid.click} {grid.keys}</p>}
          {state.view === "heads" && <p>{grid.axes} {HAS_MAPS && (data.image ? grid.pictures : grid.map)}</p>}
          {state.view === "history" && <p>{history.keys}</p>}
          {state.view === "head" && <p>{head.steps.keys} {HAS_MAPS && grid.map}</p>}
          <h2>{help.keysTitle}</h2>
          <dl class="keys">{keysHere().map(([key, does]) => <div key={does}><dt><kbd>{key}</kbd></dt><dd>{does}</dd></div>)}</dl>
        </Menu>
        <Menu name="view" label={bar.view}><Switches {...rest} /></Menu>
      </div>
    </header>
  );
}

/** The keys that do something on this page. */
function keysHere(): [string, string][] {
  return data.history ? help.keys.filter(([key]) => ["?", "/", "Tab", "Esc"].includes(key)) : help.keys;
}

/** A button that opens a panel; Escape and a click elsewhere close it. */
function Menu({ name, label, mark, children }: { name: string; label: string; mark?: string; children: ComponentChildren }) {
  const [open, setOpen] = useState(false);
  const element = useRef<HTMLDivElement>(null);
  const button = useRef<HTMLButtonElement>(null);
  const panel = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => { // at once: a click before the next frame closes it, too
    if (!open) return;
    const elsewhere = (event: Event) => element.current!.contains(event.target as Node) || setOpen(false);
    const events = ["pointerdown", "focusin"];
    for (const each of events) addEventListener(each, elsewhere);
    return () => events.forEach((each) => removeEventListener(each, elsewhere));
  }, [open]);
  useLayoutEffect(() => {
    if (!mark) return;
    const typed = (event: KeyboardEvent) => { // the mark is a key, too
      if (event.key !== mark || event.ctrlKey || event.altKey || event.metaKey || /^(INPUT|SELECT|TEXTAREA)$/.test((event.target as HTMLElement).tagName)) return;
      event.preventDefault();
      setOpen(true);
      panel.current!.hidden = false; // now: what is hidden cannot get the focus
      panel.current!.querySelector("button")?.focus();
    };
    addEventListener("keydown", typed);
    return () => removeEventListener("keydown", typed);
  }, [mark]);
  const clicked = (event: MouseEvent) => (event.target as Element).closest(".close-menu") && setOpen(false); // it opens something else
  const pressed = (event: KeyboardEvent) => {
    if (event.key !== "Escape" || !open) return;
    event.stopPropagation();
    setOpen(false);
    button.current!.focus();
  };
  return (
    <div class={`menu ${name}`} ref={element} onKeyDown={pressed}>
      <button type="button" ref={button} aria-label={mark ? label : undefined} title={mark ? label : undefined} aria-expanded={open} aria-controls={`menu-${name}`} onClick={() => setOpen(!open)}>
        {mark ?? <>{label} <span aria-hidden="true">▾</span></>}
      </button>
      <div id={`menu-${name}`} class="panel" ref={panel} hidden={!open} onClick={clicked}>{children}</div>
    </div>
  );
}

function Tabs({ view, against, show }: { view: View; against: string; show: (view: View) => void }) {
  const list = useRef<HTMLDivElement>(null);
  useEffect(() => { // where the tabs do not fit, the selected one is scrolled to
    const [box, tab] = [list.current!, document.getElementById(`tab-${view}`)!];
    if (box.scrollWidth > box.clientWidth) box.scrollLeft = tab.offsetLeft - box.offsetLeft - (box.clientWidth - tab.offsetWidth) / 2;
  }, [view]);
  const VIEWS = views(against);
  const pressed = (event: KeyboardEvent) => {
    const at = VIEWS.indexOf(view as Tab);
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: -1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const to = VIEWS[(next + VIEWS.length) % VIEWS.length];
    show(to);
    document.getElementById(`tab-${to}`)!.focus();
  };
  return (
    <div role="tablist" aria-label={tabs.label} onKeyDown={pressed} ref={list}>
      {VIEWS.map((name) => (
        <button key={name} type="button" role="tab" id={`tab-${name}`} aria-selected={view === name} aria-controls="view"
          tabIndex={view === name ? 0 : -1} onClick={() => show(name)}>{name === "alarms" ? tabs.alarms(data.history!.alarms.length) : tabs[name]}</button>
      ))}
    </div>
  );
}

/** The statistics that some head has. */
const KNOWN = data.names.filter(({ name }) => all().some(({ layer, head }) => statistic(layer, head, name) !== null));

/** The regions of the image that some head attends to. */
const LOOKED = [...new Set(data.image?.clear.flat())].filter((name) => name !== null);

function Switches({ state, change, theme, pick }: Props) {
  const maps = HAS_MAPS && ["heads", "head", "compare", "changes", "change"].includes(state.view);
  const pooled = data.layers.some((layer) => layer.map && !layer.map.exact);
  const many = state.view === "heads" || state.view === "table";
  const names: [string, string][] = KNOWN.map(({ name, heading }) => [name, heading]);
  if (data.patterns.length > 0) names.unshift(["score", controls.score]);
  return (
    <>
      {maps && (
        <fieldset>
          <legend>{bar.maps}</legend>
          {data.image && state.view === "heads" && (
            <Select label={controls.thumbs} value={state.thumbs} options={[["received", controls.thumbsMean(data.image.special)], ["patch", controls.thumbsSelected], ["map", controls.thumbsMap]]} choose={(thumbs) => change({ thumbs })} />
          )}
          <Select label={controls.scale} value={state.scale} options={[["linear", controls.scales.linear], ["log", controls.scales.log]]} choose={(scale) => change({ scale })} />
          <Select label={controls.colours} value={state.colours} options={PALETTES.map((name) => [name, controls.palettes[name]])} choose={(colours) => change({ colours })} />
          {pooled && <Select label={controls.pool} value={state.pool} options={[["mean", controls.pools.mean], ["max", controls.pools.max]]} choose={(pool) => change({ pool })} />}
          {SINK && <label title={controls.hideHelp(FIRST_COLUMN)}>
            {controls.hide(FIRST_COLUMN)} <input type="checkbox" checked={state.sink} onChange={(event) => change({ sink: event.currentTarget.checked })} />
          </label>}
          {data.image && state.view !== "compare" && (
            <label>{controls.overlay} <input type="checkbox" checked={state.over} onChange={(event) => change({ over: event.currentTarget.checked })} /></label>
          )}
        </fieldset>
      )}
      {state.view === "history" && (
        <fieldset>
          <legend>{bar.maps}</legend>
          <Select label={controls.colours} value={state.colours} options={PALETTES.map((name) => [name, controls.palettes[name]])} choose={(colours) => change({ colours })} />
        </fieldset>
      )}
      {many && (
        <fieldset>
          <legend>{bar.heads}</legend>
          <Select label={controls.sort} value={state.sort} options={[["", controls.sortLayer], ...names]} choose={(sort) => change({ sort })} />
          {state.sort && <Select label={controls.order} value={state.down ? "1" : ""} options={[["1", controls.largest], ["", controls.smallest]]} choose={(down) => change({ down: down !== "" })} />}
          {data.patterns.length > 0 && (
            <Select label={controls.pattern} value={state.pattern} options={[["", controls.anyPattern], ...Object.keys(data.patternWords).map((name): [string, string] => [name, patternNames[name] ?? name]), ...LOOKED.map((name): [string, string] => [name, regionNames[name] ?? name])]} choose={(pattern) => change({ pattern })} />
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
        </fieldset>
      )}
      <fieldset>
        <legend>{bar.page}</legend>
        <Select label={themes.label} value={theme} options={[["", themes.auto], ["light", themes.light], ["dark", themes.dark]]} choose={pick} />
        <Select label={bar.language} value={languageOf(state.lang)} options={Object.entries(LANGUAGES) as [Language, string][]} choose={(to) => change({ lang: remember(to) && !state.lang ? "" : to })} />
        <CompareWith {...{ state, change }} />
        {location.protocol !== "about:" && <CopyLink {...{ state }} />}
      </fieldset>
    </>
  );
}
