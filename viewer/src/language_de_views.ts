// German, continued: figures, two recordings, a training's history. Words: die Aufzeichnung (recording), der Alarm, der Schritt (step).

import type { Translation } from "./languages";
import { counted, figure, fromTo, percent, span, whole, withSign } from "./texts";

const heads = (count: number) => (count === 1 ? "weiterer Head" : "weitere Heads");

/** "3", "1 und 3", "1, 2 und 3". */
function listed(names: string[]): string {
  return names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} und ${names[names.length - 1]}`;
}

function inLayers(moved: number, layers: string[]): string {
  if (layers.length === 0) return "";
  if (layers.length === 1) return `${moved === 1 ? "" : ", alle"} in Schicht ${layers[0]}`;
  return layers.length <= 4 ? `, in den Schichten ${listed(layers)}` : `, in ${layers.length} Schichten`;
}

/** Which lines there are where no token is chosen. */
export function largestOrAbove(least: string, most: number | null): string {
  return most === null ? `Gewichte über ${least}` : `die ${whole(most)} größten Gewichte dieses Teils des Texts`;
}

export const headTip: Translation["headTip"] = {
  strongest: "Am stärksten: {pair}, {weight}",
  effective: (keys) => `Effektive Keys: im Mittel ${keys}`,
  strip: (layer) => `Heads von ${layer}`,
};

export const chance: Pick<Translation["segments"], "scale" | "below" | "above" | "within" | "reads" | "readsNone" | "readsWithout" | "readsLess" | "counts" | "withoutIn"> = {
  scale: "Anteil, verglichen mit dem Zufall",
  below: (points) => `${points} Punkte darunter`,
  above: (points) => `${points} Punkte darüber`,
  within: (clear) => (clear ? "Grau: Der Anteil ist vom Zufall nicht zu unterscheiden: Er ist davon höchstens 3 Standardabweichungen oder 1 % entfernt." : "Grau: Der Anteil weicht höchstens um ein Fünftel vom Zufall ab."),
  reads: (to, share, chance) => `{head} liest „${to}“ am meisten: ${share} (Zufall ${chance}).`,
  readsNone: (to, share, chance) => `Kein Head liest „${to}“ deutlich mehr als der Zufall. Der größte Anteil, ${share} von {head}, ist vom Zufall (${chance}) nicht zu unterscheiden.`,
  readsWithout: (share, leads) => `Ohne das erste Token sind es ${share}${leads ? ", weiterhin am meisten" : "; dann liest {other} am meisten"}.`,
  readsLess: (to) => `Kein Head liest „${to}“ mehr als der Zufall.`,
  counts: (more, less, of) => `Von ${of === 1 ? "einem Head" : `${whole(of)} Heads`} ${(more || less) === 1 ? "liest" : "lesen"} es ${more === 0 ? "" : `${whole(more)} mehr als der Zufall, `}${whole(less)} weniger.`,
  withoutIn: (share) => `(${share} ohne das erste Token)`,
};

export const whose: Translation["whose"] = {
  shows: "Diese Ansicht zeigt",
  unlike: "B hat andere Heads, Längen oder Karten, also zeigt diese Ansicht nur A. Eine Seite von B allein: headscope report B.",
  title: "Zwei Heads, von A und B oder beide von A",
  group: (side, name) => (side === name ? side : `${side}: ${name}`),
  within: "Zweiter − erster",
  scales: "Zweiter − erster: Orange ist mehr Aufmerksamkeit im zweiten Head, Violett weniger. Beide Karten sind von A und haben eine gemeinsame Farbskala.",
  columns: { a: "erster", b: "zweiter" },
};

export const everyHead: Translation["everyHead"] = {
  label: "Das Token in allen Heads",
  title: "{token} ({at}) in allen Heads: das Token, auf das es am meisten achtet. Zeigt man auf eine Zelle, erscheinen die Linien dieses Heads.",
  cell: (head, key, weight) => `${head}: ${key}, ${weight}`,
  none: (head) => `${head}: Dieses Token gehört nicht zu den Queries`,
  always: "Die Tabelle zeigt „achtet auf“, in welche Richtung die Linien auch führen.",
};

export const figures: Translation["figures"] = {
  figure: "Abbildung",
  of: (what) => `Abbildung: ${what}`,
  kinds: { png2: "PNG 2×", png3: "PNG 3×", svg: "SVG" },
  kindHelp: { png2: "Für Folien und Bildschirme", png3: "Für den Druck", svg: "Text bleibt Text; scharf in jeder Größe" },
  copy: "Abbildung kopieren",
  copyHelp: "Das PNG 3×, zum Einfügen in ein Dokument",
  copied: "Kopiert",
  notCopied: "Der Browser erlaubt der Seite hier nicht, Bilder zu kopieren. Speichern Sie stattdessen das PNG.",
  saved: (name) => `${name} gespeichert`,
  dark: "auf dunklem Grund",
  darkHelp: "Sonst stehen Abbildungen auf Weiß, unabhängig vom Farbschema der Seite.",
  tooLarge: "Die Abbildung ist zu groß für diesen Browser. Filtern Sie die Heads, oder speichern Sie SVG.",
  model: (name) => `Modell: ${name}.`,
  input: (text) => `Eingabe: ${text}.`,
  range: (rows, row, rowStop, columns, column, columnStop) => `Zeilen: ${rows} ${fromTo(row, rowStop)}; Spalten: ${columns} ${fromTo(column, columnStop)}.`,
  numbered: (at, token) => `${whole(at)} ${token}`,
  pooledTile: "Jede Zelle fasst mehrere Paare aus Query und Key zusammen.",
  ofInput: (input) => `Gewichte für: ${input}.`,
  scale: (scale) => (scale === "linear" ? "Lineare Farbskala." : "Logarithmische Farbskala über vier Zehnerpotenzen."),
  signed: "Orange: B ist größer; Violett: A ist größer.",
  masked: (blank, broken) => `${blank ? "Schraffiert" : "Grau"}: maskiert${broken ? ", oder die Zeile enthält NaN oder Unendlich" : ""}.`,
  over: "Die Farben liegen über dem Bild und sind mit ihm gemischt.",
  rough: "Werte sind mit 8 Bit gespeichert.",
  eachMap: "In jeder Karte sind Zeilen Queries und Spalten Keys.",
  ownScales: "Jede Karte hat ihre eigene Farbskala.",
  eachPicture: (mean) => `In jedem Bild ist die Farbe eines Patches die Aufmerksamkeit auf ihm: ${mean}.`,
  eachPatch: (patch) => `In jedem Bild ist die Farbe eines Patches das Gewicht, das ${patch} auf ihn legt; der Rahmen markiert ${patch}.`,
  shareOfQuantile: (scale) => `Anteil am 99,5-%-Quantil jeder Karte, ${{ linear: "linear", log: "logarithmisch" }[scale]}`,
  shareOfLargest: (image, scale) => `Anteil am größten Gewicht ${image ? "jedes Bildes" : "jeder Karte"}, ${{ linear: "linear", log: "logarithmisch" }[scale]}`,
  heads: (count, order) => `${counted(count, "head")}${order && `, sortiert nach ${order}`}`,
  match: (about) => [about.includes("%") && "Prozent: Übereinstimmung mit dem Muster, 100 % = genau dieses.", about.includes("×") && "× 2: doppelt so viel Aufmerksamkeit auf der Region wie bei gleichmäßiger Verteilung."].filter(Boolean).join(" "),
  strips: (from, to, first) => `Spalten: Queries ${whole(from)}–${whole(to)}; Zeilen: Keys nach ihrem Abstand von der Query${first > 0 ? `, dann ${first === 1 ? "der erste Key" : `die ersten ${counted(first, "key")}`}` : ""}.`,
  tokens: (start, stop) => `Tokens ${fromTo(start, stop)}.`,
  linesOfAll: (least, most) => `Linien: ${largestOrAbove(least, most)}, außer auf dem Token selbst und auf dem ersten. Breitere Linien sind größere Gewichte.`,
  linesOfOne: (token, direction, least) =>
    `Linien: ${{ from: `worauf ${token} achtet`, to: `was auf ${token} achtet`, both: `worauf ${token} achtet und was darauf achtet` }[direction]}, ab einem Gewicht von ${least}. Breitere Linien sind größere Gewichte.`,
  patches: {
    image: () => "",
    looks: (name) => `Worauf ${name} achtet; der Rahmen markiert die Query.`,
    "looked-at": (name) => `Was auf ${name} achtet; der Rahmen markiert den Key.`,
    all: () => "Mittel über alle Queries.",
  },
  orLess: (value) => `≤ ${value}`,
  orMore: (value) => `≥ ${value}`,
  allHeads: "alle Heads",
  map: (head) => `die Karte von ${head}`,
  strip: "die nahen Tokens",
  reading: "der Text",
  segmentsOf: (head) => `die Segmente von ${head}`,
  segmentsOfAll: "die Segmente aller Heads",
};

export const compare: Translation["compare"] = {
  title: "Zwei Heads",
  a: "Head A",
  b: "Head B",
  difference: "Differenz (B − A)",
  differenceOf: (a, b) => `${b} − ${a}`,
  unlike: "Die Karten von A und B haben verschiedene Bins, daher gibt es keine Differenz.",
  statistics: "Statistik beider Heads",
  columns: { mean: "Mittel über Queries", a: "A", b: "B", difference: "B − A" },
};

export const table: Translation["table"] = {
  title: "Statistik aller Heads",
  hint: "Jeder Wert ist ein Mittel über die Queries, für die es die Größe gibt. Entropien sind in nats. Ein Klick auf eine Überschrift sortiert.",
  head: "Head",
  pattern: "Muster",
  score: "Score",
  scoreMeaning: "Wie genau die Karte ihrem besten Muster folgt: 1 = genau, 0 = nicht näher als der Zufall.",
};

export const trace: Translation["trace"] = {
  title: "Schritt für Schritt",
  hint: "Ein Vorwärtsdurchlauf von Multi-Head-Attention. Die Werte sind die ersten des ersten Batch-Eintrags und Heads.",
  oneLayer: "Ein Trace gilt für ein Modul, daher enthält die Seite nur die Schritte dieser Schicht. headscope.trace(module, x) zeichnet die einer anderen auf.",
  size: (letter, size) => `${letter} = ${size}`,
  mistake: "Häufiger Fehler.",
  here: "Hier.",
  unusual: "ungewöhnlich",
};

export const changes: Translation["changes"] = {
  title: "Was sich von A zu B verändert hat",
  thisPage: "diese Seite",
  sides: "A: {a}. B: {b}.",
  summary: (moved, of, layers) => `${whole(moved)} von ${whole(of)} Heads ${moved === 1 ? "hat" : "haben"} sich verändert${inLayers(moved, layers)}.`,
  most: "Am meisten: {head} ({change}).",
  none: (of) => `Keiner der ${whole(of)} Heads hat sich verändert.`,
  largest: "Die größte Veränderung ist die von {head} ({change}): {size} der Schwelle.",
  hint: "Ein Klick öffnet den Head.",
  limits: ({ share, nats, logits, ratio, map, errors }) =>
    `Verändert: ein Anteil um ${whole(100 * share)} Prozentpunkte, die Entropie um ${figure(nats, 2)} nats, Keys, Distanz oder Value-Norm um × ${figure(ratio)}, ein Logit um ${whole(logits)}, oder ${percent(map)} der Aufmerksamkeit anderswo; und um ${whole(errors)} Standardfehler.`,
  sharper: (change) => `schärfer: ${change}`,
  broader: (change) => `breiter: ${change}`,
  only: "Nur veränderte Heads",
  showMore: (count) => `${whole(count)} weitere zeigen`,
  shown: (shown, of) => `${whole(shown)} von ${counted(of, "head")}`,
  a: "A",
  b: "B",
  difference: "B − A",
  differenceOf: (head) => `${head}: B − A`,
  sideOf: (side, name) => (side === name ? side : `${side}: ${name}`),
  scales: "B − A: Orange ist mehr Aufmerksamkeit in B, Violett weniger. A und B teilen eine Farbskala.",
  change: (name, before, after) => `${name} ${before} → ${after}`,
  mapScale: (scale) => (scale === "log" ? "Die Skala von A und B ist logarithmisch über vier Zehnerpotenzen, die von B − A linear." : "Alle Skalen sind linear."),
  mapChange: (share) => `Karte: ${share} der Aufmerksamkeit liegen anderswo`,
  receivedChange: (share) => `erhalten: ${share} gehen an andere Tokens`,
  brokenChange: (before, after) => `Zeilen mit NaN oder Unendlich ${whole(before)} → ${whole(after)}`,
  moved: "verändert",
  valuesOnly: "nur die Value-Norm, nicht die Aufmerksamkeit",
  still: "nicht verändert",
  label: (head, moved, what) => `${head}, ${moved ? "verändert" : "nicht verändert"}${what && `: ${what}`}`,
  back: "← Alle Veränderungen",
  nearby: "Heads dieser Liste",
  previous: "voriger Head der Liste",
  next: "nächster Head der Liste",
  at: (at, of) => `${whole(at)} von ${whole(of)}`,
  statistics: "Statistik dieses Heads in A und B",
  columns: { name: "Mittel über Queries", before: "A", after: "B", change: "B − A", size: "× Schwelle" },
  map: "Karte: Anteil der Aufmerksamkeit, der anderswo liegt",
  received: "erhalten: Anteil, der an andere Tokens geht",
  broken: "Zeilen mit NaN oder Unendlich",
  notMoved: "weniger als 3 Standardfehler",
  sizeHelp: "Die Veränderung, gemessen in Schwellen. Ab 1 hat sich der Head verändert, falls sie auch größer als drei Standardfehler ist.",
  noDifference: "Die Karten von A und B sind verschieden groß, daher gibt es keine Karte der Differenz. Vergleichen Sie Aufzeichnungen gleicher Länge.",
  noMaps: "Es wurden keine Karten aufgezeichnet, daher wird nur die Statistik verglichen. Observe(map=64) zeichnet Karten auf.",
  csv: "CSV",
  signed: withSign,
  segment: (query, key) => `${query} → ${key}`,
  layer: (name) => `Schicht ${name}`,
  heads: (layer, more) => `${counted(more, "head")} der Schicht ${layer}`,
  different: (what, [a, b]) =>
    `Verschiedene ${{ runs: "Anzahlen von Vorwärtsdurchläufen", lookedAt: "Anzahlen gemessener Queries", keys: "Längen", first: "Anzahlen erster Keys", bins: "Anzahlen der Bins der Karten" }[what]}: ${span(a)} in A, ${span(b)} in B.`,
  unlikeMaps: (all) => (all ? "Die Karten von A und B sind verschieden groß, daher wird nur die Statistik verglichen." : "Einige Karten von A und B sind verschieden groß, daher werden sie nicht verglichen."),
  rough: "Karten sind mit 8 Bit gespeichert, daher kann der Anteil der Aufmerksamkeit, der anderswo liegt, um bis zu 2 Prozentpunkte abweichen.",
  otherCells: "Daher umfasst eine Zelle in B eine andere Zahl von Tokens, und ihr mittleres Gewicht ist auch deshalb ein anderes.",
  otherSample: "Karten werden nicht verglichen, wo A und B verschiedene Anteile der Queries gemessen haben.",
  otherSegments: "Die Segmente haben verschiedene Namen, daher werden sie nicht verglichen.",
  noSpread: "Die Seite eines einzelnen Textes enthält nicht die Streuung der Zeilen, daher zählt jede Veränderung über ihrer Schwelle.",
  onlyIn: (side, names) => `Nur in ${side}: ${names.join(", ")}.`,
  unchecked: (which) => `${which === "AB" ? "A und B nennen" : `${which} nennt`} das Modell nicht, daher kann headscope nicht prüfen, ob beide zusammengehören.`,
  otherModel: (a, b, same) => `Diese Aufzeichnungen sind von verschiedenen Modellen: ${a} und ${b}${same ? " mit anderer Konfiguration" : ""}. Vergleichen Sie Aufzeichnungen einer Architektur.`,
  otherHeads: (layer, a, b) => `Schicht ${layer} hat ${a === b ? "in der anderen Aufzeichnung einen anderen Teil der Heads" : `hier ${whole(a)} Heads und in der anderen Aufzeichnung ${whole(b)}`}. Vergleichen Sie Aufzeichnungen einer Architektur.`,
  otherWidths: (layer, a, b) => `Die Heads der Schicht ${layer} haben hier ${whole(a)} Dimensionen und in der anderen Aufzeichnung ${whole(b)}. Vergleichen Sie Aufzeichnungen einer Architektur.`,
  noLayers: (a, b) => `Diese Aufzeichnungen haben keine Schicht gemeinsam (die ersten: ${a}, ${b}). Vergleichen Sie Aufzeichnungen eines Modells.`,
};

export const links: Translation["links"] = {
  onThisDisk: "Die Seite ist eine Datei auf diesem Computer, daher gilt der Link nur hier. Senden Sie anderen die Datei und dies:",
  copyPart: "Dateiname und Ansicht kopieren",
  lacks: (file) => `Der Link öffnet nur diese Seite. B muss wieder abgelegt werden: Senden Sie auch ${file}.`,
  awaited: (file) => `Dieser Link vergleicht mit ${file}. Legen Sie diese Datei hier ab, oder wählen Sie sie aus.`,
  choose: "Datei wählen …",
  without: "Ohne sie fortfahren",
};

export const dropped: Translation["dropped"] = {
  here: "Eine Aufzeichnung oder eine Seite von headscope hier ablegen, um sie mit dieser zu vergleichen.",
  reading: (file) => `${file} wird gelesen …`,
  comparing: (file, head, of) => `${file} wird verglichen: Head ${whole(head)} von ${whole(of)} …`,
  cancel: "Abbrechen",
  close: "Schließen",
  one: (count) => `Bitte nur eine Datei ablegen, nicht ${whole(count)}.`,
  empty: (file) => `${file} ist leer.`,
  unreadable: (file) => `${file} ist nicht lesbar. Legen Sie eine Datei ab, keinen Ordner.`,
  foreign: (file) => `${file} ist keine Aufzeichnung von headscope. Legen Sie eine .safetensors-Datei ab, die headscope gespeichert hat, oder eine seiner .html-Seiten.`,
  truncated: (file) => `${file} ist abgeschnitten: Das Ende fehlt. Kopieren oder speichern Sie die Datei noch einmal.`,
  damaged: (file, what) => `${file} ist beschädigt (${what}). Kopieren oder speichern Sie die Datei noch einmal.`,
  newer: (file) => `${file} stammt von einer neueren Version von headscope. Erzeugen Sie diese Seite mit jener Version neu.`,
  changed: (file) => `${file} wurde verändert, während die Seite die Datei las. Wählen Sie sie noch einmal.`,
  tooLarge: (file, most) => `${file} ist zu groß für die Seite, die höchstens ${whole(most)} MiB Statistik und Karten liest. Nutzen Sie: headscope report A B.`,
  lacks: (name) => `${name} fehlt`,
  overlap: "ihre Tensoren füllen sie nicht",
  header: "ihr Header",
  pageData: "ihre Daten",
  contents: "ihr Inhalt",
};

export const history: Translation["history"] = {
  title: "Alle Heads im Lauf des Trainings",
  keys: "Die Pfeiltasten links und rechts führen zu einem anderen Schritt, Pos1 und Ende zum ersten und zum letzten. In der Karte wählen die Pfeiltasten oben und unten einen Head.",
  hint: "Jede Zeile ist ein Head, jede Spalte ein Schritt. Ein Klick wählt Head und Schritt.",
  startsHint: "Eine dünne Linie markiert, wo ein weiteres watch beginnt.",
  quantity: "Zeigen",
  rows: "Zeilen",
  ranks: { layer: "nach Schicht", change: "stärkste Veränderung zuerst", alarm: "erster Alarm zuerst" },
  step: (step) => `Schritt ${whole(step)}`,
  side: (step, name) => `Schritt ${whole(step)}, ${name}`,
  slider: "Schritt",
  axis: "Schritt",
  before: "Voriger Alarm",
  after: "Nächster Alarm",
  flags: { "entropy collapse": "Entropie-Kollaps", "growing logits": "wachsende Logits", "rising sink": "wachsender Sink" },
  marks: { "entropy collapse": "▼", "growing logits": "▲", "rising sink": "◆" },
  does: {
    "entropy collapse": (name, step) => `${name} kollabiert bei Schritt ${step}`,
    "growing logits": (name, step) => `${name}: Logits werden bei Schritt ${step} zu groß`,
    "rising sink": (name, step) => `${name} wendet sich bei Schritt ${step} dem ersten Token zu`,
  },
  change: {
    "entropy collapse": (before, value, limit) => `normierte Entropie ${before} → ${value} (Alarm unter ${limit})`,
    "growing logits": (before, value, limit) => `höchster Logit ${before} → ${value} (Alarm über ${limit})`,
    "rising sink": (before, value, limit) => `Gewicht auf dem ersten Token ${before} → ${value} (Alarm über ${limit})`,
  },
  valueAt: (value, step) => `${value} in Schritt ${whole(step)}`,
  more: (count, step, tied) => `${whole(count)} ${heads(count)} bis Schritt ${step}${tied > 0 ? `, davon ${whole(tied)} im selben Schritt` : ""}`,
  quiet: (steps) => `Kein Alarm in ${steps === 1 ? "einem Schritt" : `${whole(steps)} Schritten`}.`,
  unwatched: "Es wurden keine Alarme verlangt: watch(alarms=True) löst sie aus.",
  changed: (name, quantity) => `Stärkste Veränderung (${quantity}): ${name}`,
  rises: (step, heads, of) => `Ab Schritt ${step} steigt die Entropie von ${heads} der ${of} Heads`,
  riseOf: (name, before, after) => `Am stärksten: ${name}, normierte Entropie ${before} → ${after}`,
  open: "Diesen Head bei diesem Schritt zeigen",
  openHead: "Diesen Head zeigen",
  head: (name) => `Head ${name}`,
  named: (number, layer) => `Head ${number} (${layer})`,
  only: (head) => `Head ${head}`,
  short: (layer, head) => `${layer}.${head}`,
  mapLabel: (quantity, count, steps) => `Karte, ${quantity}: ${counted(count, "head")}, ${counted(steps, "step")}. Die Pfeiltasten oben und unten wählen einen Head, links und rechts einen Schritt.`,
  gridTitle: (step) => `Alle Heads bei Schritt ${whole(step)}`,
  gridLabel: (quantity, step, low, high) => `${quantity}, alle Heads bei Schritt ${whole(step)}: ${low} bis ${high}. Pfeiltasten wählen einen Head.`,
  gridAxes: "Zeilen sind Schichten, Spalten sind Heads.",
  value: (name, step, quantity, value) => `${name}, Schritt ${whole(step)}: ${quantity} ${value}`,
  alarm: (what, value, limit) => `${what}: ${value} (Grenze ${limit})`,
  bands: (quantity) => `${quantity}, alle Heads`,
  bandLabel: (quantity, step, parts) =>
    `${quantity} über alle Heads. Bei Schritt ${whole(step)}: Minimum ${parts[0]}, 10 % ${parts[1]}, Median ${parts[2]}, 90 % ${parts[3]}, Maximum ${parts[4]}.`,
  bandHint: "Schattiert: alle Heads, dunkler 10–90 %. Linie: Median. Rot: der gewählte Head. Gestrichelt: die Grenze des Alarms.",
  limit: (value) => `Alarm ${value}`,
  curves: (name) => `${name}: alle Größen`,
  curveLabel: (quantity, name, step, value, low, high) => `${quantity}, ${name}: ${value} bei Schritt ${whole(step)}; von ${low} bis ${high}.`,
  stored: (of) => {
    const every = of.stride > 1 ? `, jeder ${of.stride}. dieser Schritte` : "";
    if (of.bits === 32) return "";
    const error = (of.high - of.low) / 252 / 2;
    const size = of.scale === "linear" ? `± ${figure(error, 2)}` : `± ${percent(error)} (± ${figure(error * of.pivot, 2)} nahe 0)`;
    return `Mit 8 Bit gespeichert${every}: ${size}.`;
  },
  logScale: "Logarithmische Skala.",
  log: "log. Skala",
  table: {
    title: (count) => counted(count, "alarm"),
    hint: "Jeder Alarm wird einmal ausgelöst, und erst wieder, nachdem der Wert in seine Grenze zurückgekehrt ist. „Zuvor“ nennt, womit der Wert verglichen wird: die bisher größte normierte Entropie, den ersten Logit, das bisher kleinste Gewicht auf dem ersten Token. Ein Klick auf einen Head zeigt ihn.",
    columns: { step: "Schritt", head: "Head", what: "Alarm", value: "Wert", limit: "Grenze", before: "zuvor" },
    more: (count) => `und ${whole(count)} weitere, in der Datei der History`,
  },
};
