// The languages of the page. One is put in place of the English texts, and of what Python wrote, before anything is rendered.

import { data } from "./data";
import { german } from "./language_de";
import { chinese } from "./language_zh";
import { PHRASES } from "./phrases";
import { STEPS } from "./steps";
import * as texts from "./texts";

/** The texts of a language: as the English ones, where every value is a text, or a function with the same arguments. */
type Translated<T> = T extends string ? string
  : T extends (...given: infer A) => infer R ? (...given: A) => Translated<R>
  : T extends (infer E)[] ? { [K in keyof T]: Translated<E> }
  : T extends object ? { [K in keyof T]: Translated<T[K]> } : T;
type Texts = typeof texts;
export type Translation = { [K in keyof Texts as Texts[K] extends ((...given: never[]) => unknown) | string ? never : K]: Translated<Texts[K]> };

/** Each language by its own name. */
export const LANGUAGES = { en: "English", de: "Deutsch", zh: "中文" };
export type Language = keyof typeof LANGUAGES;

const NAMES = Object.keys(LANGUAGES) as Language[];
const TAGS: Record<Language, string> = { en: "en", de: "de", zh: "zh-Hans" }; // of the document
const STORED = "headscope-language";

type Tree = { [name: string]: unknown };

function copy(tree: Tree): Tree {
  return Object.fromEntries(Object.entries(tree).map(([name, value]) => [name, isTree(value) ? (Array.isArray(value) ? [...value] : copy(value)) : value]));
}

function isTree(value: unknown): value is Tree {
  return typeof value === "object" && value !== null;
}

function assign(target: Tree, source: Tree): void {
  for (const [name, value] of Object.entries(source)) {
    if (isTree(value) && !Array.isArray(value)) assign(target[name] as Tree, value);
    else target[name] = value;
  }
}

const OBJECTS: Tree = Object.fromEntries(Object.entries(texts).filter(([, value]) => isTree(value)));
const TRANSLATIONS: Record<Language, Tree> = { en: copy(OBJECTS), de: german, zh: chinese };

let spoken: Language = "en";

/** The language of an address, or the one that the reader chose on some page, or the browser's first one that there is. */
export function languageOf(address: string): Language {
  const named = [address, stored(), ...(navigator.languages ?? [navigator.language]).map((tag) => tag.slice(0, 2).toLowerCase())];
  return NAMES.find((name) => name === named.find((each) => NAMES.includes(each as Language))) ?? "en";
}

function stored(): string {
  try {
    return localStorage.getItem(STORED) ?? "";
  } catch {
    return ""; // in the frame of a notebook
  }
}

/** Keep the reader's choice for this page and others; false where the browser keeps nothing. */
export function remember(language: Language): boolean {
  try {
    localStorage.setItem(STORED, language);
    return true;
  } catch {
    return false;
  }
}

/** Put the texts of a language in place. */
export function speak(language: Language): void {
  if (language === spoken) return;
  spoken = language;
  document.documentElement.lang = TAGS[language];
  assign(OBJECTS, TRANSLATIONS[language]);
  translateData();
  for (const [element, text] of footer()) element.textContent = say(text);
}

const written = new Map<Element, string>();

/** The lines below the view, with their English texts. */
function footer(): Map<Element, string> {
  if (written.size === 0) for (const each of document.querySelectorAll("body > footer :is(p, dt, dd)")) written.set(each, each.textContent ?? "");
  return written;
}

// ---------------------------------------------------------------- what Python wrote

const NUMBER = "([\\d.,–]+(?:e[+-]?\\d+)?%?)";
const PART = "((?:(?!; | · |[.!?] ).)+)";

type Template = { is: RegExp; all: RegExp; names: string[]; into: string };
const dictionaries = new Map<Language, { exact: Map<string, string>; templates: Template[] }>();

function dictionary() {
  let known = dictionaries.get(spoken);
  if (!known) {
    known = { exact: new Map(), templates: [] };
    for (const [english, de, zh] of PHRASES) {
      const into = spoken === "de" ? de : zh;
      if (!english.includes("{")) known.exact.set(english, into);
      else {
        const form = (part: string) => new RegExp(`^${english.replace(/[.*+?^$()|[\]\\]/g, "\\$&").replace(/\{[nabp]\}/g, NUMBER).replace(/\{\w+\}/g, part)}$`, "s");
        known.templates.push({ is: form(PART), all: form("(.+)"), names: [...english.matchAll(/\{(\w+)\}/g)].map((each) => each[1]), into });
      }
    }
    dictionaries.set(spoken, known);
  }
  return known;
}

/** A text that Python wrote, in the language of the page; what has no translation stays. `whole`: as one text, such as a title, of which the
 * parts are the reader's own. */
export function say(text: string, whole = false): string {
  if (spoken === "en" || !text || /^\w+=/.test(text)) return text; // an option is the same in every language
  if (whole) return one(text, whole) ?? text;
  const quotes: string[] = []; // what the reader wrote stays as it is
  const masked = text.replace(/“[^”]*”/g, (each) => `\ue000${quotes.push(each) - 1}\ue001`);
  const found = one(masked, false) ?? pieces(masked);
  return quotes.length === 0 ? found : found.replace(/\ue000(\d+)\ue001/g, (_, n: string) => (spoken === "de" ? quotes[+n].replace("“", "„").replace(/”$/, "“") : quotes[+n]));
}

function one(text: string, whole: boolean): string | null {
  const { exact, templates } = dictionary();
  const found = exact.get(text) ?? (/^[a-z]+(_\w+)+$/.test(text) ? exact.get(text.replaceAll("_", " ")) : undefined);
  if (found !== undefined) return found;
  if (/^[−~≈-]?[\d,]+(\.\d+)?(e[+-]?\d+)?%?$/.test(text)) return number(text);
  for (const { is, all, names, into } of templates) {
    const match = (whole ? all : is).exec(text);
    if (!match) continue;
    const parts = Object.fromEntries(names.map((name, n) => [name, whole ? match[n + 1] : say(match[n + 1])]));
    return into.replace(/\{(\w+)\}/g, (_, name: string) => parts[name] ?? "");
  }
  return null;
}

const ENDS = [/(?<=[.!?]) (?=[\w~“])/, / · /, /; /, /: /, /, /];

/** Sentence by sentence, then by the parts of a sentence. */
function pieces(text: string, level = 0): string {
  if (level === ENDS.length) return text;
  const parts = text.split(ENDS[level]);
  if (parts.length === 1) return pieces(text, level + 1);
  const between = [spoken === "zh" ? "" : " ", " · ", spoken === "zh" ? "；" : "; ", spoken === "zh" ? "：" : ": ", spoken === "zh" ? "，" : ", "][level];
  const done = parts.map((part) => one(part, false) ?? pieces(part, level + 1));
  return done.reduce((text, part) => text + (between || (/[。：，；）]$/.test(text) ? "" : " ")) + part);
}

/** A number as Python writes it, with commas and a point. */
function number(text: string): string {
  if (spoken !== "de") return text;
  return text.replace(/[.,%]/g, (each) => ({ ".": ",", ",": ".", "%": "\u00a0%" })[each]!);
}

let english: { names: Pair[]; patterns: typeof data.patternWords; regions: Record<string, Pair>; quantities: Pair[]; tables: typeof data.tables; trace: typeof data.trace } | null = null;
type Pair = { heading: string; meaning: string };

/** Put the texts among the data in place; the English ones are kept. */
function translateData(): void {
  english ??= structuredClone({ names: data.names, patterns: data.patternWords, regions: data.image?.regionWords ?? {}, quantities: data.history?.quantities ?? [], tables: data.tables, trace: data.trace });
  data.names.forEach((each, n) => Object.assign(each, said(english!.names[n])));
  data.history?.quantities.forEach((each, n) => Object.assign(each, said(english!.quantities[n])));
  for (const [name, text] of Object.entries(english.patterns)) data.patternWords[name] = say(text);
  for (const [name, pair] of Object.entries(english.regions)) Object.assign(data.image!.regionWords[name], said(pair));
  data.tables.forEach((table, n) => {
    const { title, says, columns, cells, words, caption } = english!.tables[n];
    const cell = (text: string, at: number) => (!words[at] || one(text, false) ? (one(text, false) ?? text) : text);
    Object.assign(table, { title: say(title), says: say(says), columns: columns.map((each) => one(each, false) ?? each), cells: cells.map((line) => line.map(cell)), caption: say(caption) });
  });
  if (data.trace) {
    data.trace.title = say(english.trace!.title, true);
    data.trace.stages.forEach((stage, n) => {
      const from = english!.trace!.stages[n];
      stage.name = from.name.replace(/^(\d+\. )?(.*)$/, (_, number: string | undefined, name: string) => (number ?? "") + say(name));
      stage.steps.forEach((step, at) => Object.assign(step, stepOf(from.steps[at])));
    });
  }
}

function said({ heading, meaning }: Pair): Pair {
  return { heading: say(heading), meaning: say(meaning) };
}

/** The texts of a step; a number at the end of its name does not count. */
function stepOf(step: NonNullable<typeof data.trace>["stages"][0]["steps"][0]): Partial<typeof step> {
  const name = step.step.replace(/[\d ]+$/, "");
  const [is, why, mistake] = spoken === "en" ? ["", "", ""] : (STEPS[name]?.[spoken] ?? ["", "", ""]);
  return {
    step: is ? step.step.replace(name, is) : step.step,
    why: step.why && why ? why : step.why,
    mistake: step.mistake && mistake ? mistake : step.mistake,
    invariant: say(step.invariant),
    note: say(step.note),
    equation: say(step.equation, true),
    corner: step.corner?.map((line) => line.map((each) => one(each, false) ?? each)) ?? null,
  };
}
