// German, continued: the help, the tour and the glossary.

import type { Translation } from "./languages";

export const help: Translation["help"] = {
  title: "Hilfe",
  close: "Schließen",
  keysTitle: "Tasten",
  keys: [
    ["?", "diese Hilfe öffnen"],
    ["/", "ein Token, eine Position oder einen Head suchen"],
    ["Tab", "zum nächsten Teil der Seite"],
    ["← ↑ ↓ →", "alle Heads, Reiter, Tokens: zum Nachbarn"],
    ["Enter", "den Head öffnen, das Token auswählen"],
    ["← ↑ ↓ →", "ein Head: nächster Head, nächste Schicht"],
    ["Umschalt + ← ↑ ↓ →", "auf der Karte: die gewählte Zelle verschieben"],
    ["+ − 0", "auf der Karte: hineinzoomen, herauszoomen, alles zeigen"],
    ["Esc", "schließen, Auswahl aufheben oder zurück zu allen Heads"],
  ],
  page: "Diese Seite",
  takeTour: "Rundgang starten (20 Sekunden)",
  glossary: "Glossar",
};

export const tour: Translation["tour"] = {
  label: "Rundgang",
  step: (at, of) => `${at} von ${of}`,
  next: "Weiter",
  back: "Zurück",
  done: "Fertig",
  leave: "Beenden",
  steps: {
    changes: "Zwei Aufzeichnungen: die veränderten Heads, die größte Veränderung zuerst. Ein Klick öffnet einen Head in A, in B und als Differenz.",
    happened: "Was zuerst ansehen: die ersten Alarme. Ein Klick zeigt den Head beim Schritt seines Alarms.",
    steps: "Das ganze Training: Jede Zeile ist ein Head, jede Spalte ein Schritt. Marken sind Alarme.",
    slider: "Der Regler oder die Pfeiltasten links und rechts wählen einen Schritt.",
    step: "Alle Heads beim gewählten Schritt und die Kurven des gewählten Heads.",
    findStep: "Einen Head oder einen Schritt suchen. Die Taste / führt hierher, ? öffnet die Hilfe mit dem Glossar.",
    cards: "Was zuerst ansehen: die auffälligen Heads, jeder in einem Satz. Ein Klick öffnet den Head und wählt ein Beispiel aus.",
    grid: "Alle Heads: eine kleine Karte für jeden. Zeilen sind Schichten, Spalten sind Heads. Dunkle Zellen sind starke Aufmerksamkeit, auf einer dunklen Seite helle.",
    map: "Ein Head: Jede Zeile ist ein Token, das auf andere achtet, jede Spalte eines, das beachtet wird. Zeigt man auf eine Zelle, erscheint ihr Gewicht; ein Klick wählt sie aus.",
    pictures: "Ein Head: worauf der gewählte Patch achtet, was auf ihn achtet, und der Mittelwert. Ein Klick wählt einen Patch.",
    beside: "Hier steht, worauf das gewählte Token achtet, warum, und die Statistik des Heads.",
    reading: "Text: Linien führen von jedem Token zu denen, auf die es achtet.",
    find: "Ein Token, eine Position oder einen Head suchen. Die Taste / führt hierher, ? öffnet die Hilfe mit Tasten und Glossar.",
  },
};

export const glossary: Translation["glossary"] = {
  title: "Glossar",
  back: "Alle Begriffe",
  hint: "Jedes Bild ist eine Karte von acht Tokens: eine Zeile für jede Query, eine Spalte für jeden Key. Die markierten Zellen erhalten das Gewicht.",
  open: (name) => `${name}: Bedeutung`,
  patterns: "Muster",
  statistics: "Statistik",
  words: "Begriffe",
  example: (letters) => `Tokens im Bild: ${letters}`,
  picture: (name, does) => `Karte des Musters „${name}“: ${does}`,
  entries: {
    previous: "Jedes Token achtet auf das unmittelbar davor.",
    next: "Jedes Token achtet auf das unmittelbar danach. Das kann nur ein Modell, das vorauslesen darf.",
    self: "Jedes Token achtet auf sich selbst.",
    duplicate: "Jedes Token achtet auf frühere Vorkommen seiner selbst.",
    induction: "Jedes Token achtet auf das, was auf sein früheres Vorkommen folgte. So kann das Modell einen Text fortsetzen, den es schon gelesen hat.",
    "fixed key": "Jedes Token achtet auf dasselbe, etwa einen Punkt oder [SEP], wo auch immer es steht.",
    first: "Jedes Token achtet auf das erste. Viele Heads legen dort Aufmerksamkeit ab, die sie nicht brauchen: ein Attention Sink.",
    local: "Jedes Token achtet gleichmäßig auf seine Nachbarn, höchstens 3 Stellen entfernt.",
    uniform: "Jedes Token achtet gleichmäßig auf alle Tokens, auf die es achten darf.",
  },
  terms: {
    attention: ["Aufmerksamkeit (Attention)", "Ein Token liest aus anderen Tokens. Seine Gewichte geben an, wie viel aus jedem, und ergeben zusammen 1."],
    head: ["Head", "Eine Art zu wählen, was gelesen wird. Eine Schicht hat mehrere Heads, die nebeneinander arbeiten."],
    query: ["Query", "Das Token, das liest: eine Zeile der Karte."],
    key: ["Key", "Ein Token, das gelesen werden kann: eine Spalte der Karte."],
    weight: ["Gewicht", "Der Anteil der Aufmerksamkeit einer Query auf einem Key, von 0 bis 1."],
    mask: ["Maske", "Auf welche Keys eine Query achten darf. Eine kausale Maske verbirgt alle späteren Tokens."],
    softmax: ["Softmax", "Die Funktion, die aus den Scores einer Query Gewichte macht."],
    match: ["Übereinstimmung", "Wie genau ein Head einem Muster folgt: 100 % = genau, 0 % = nicht näher als der Zufall. Unter 50 % steht im Namen „teils“."],
  },
  units: {
    entropy: "nats", normalized_entropy: "0 bis 1", max_weight: "0 bis 1", effective_keys: "Keys", mass: "0 bis 1", distance: "Positionen oder Patches", previous: "0 bis 1", next: "0 bis 1",
    self: "0 bis 1", duplicate: "0 bis 1", induction: "0 bis 1", first: "0 bis 1", lse: "ein Logarithmus", max_logit: "ein Logit", chance: "0 bis 1", value_norm: "eine Länge", second_weight: "0 bis 1",
    recall: "0 bis 1", recall_kl: "nats", largest_selected: "0 oder 1",
  },
  unit: (unit) => `Einheit: ${unit}.`,
  received: ["erhaltene Aufmerksamkeit", "Das mittlere Gewicht, das ein Key von den Queries erhält, die auf ihn achten dürfen: die Balken über der Karte."],
};
