// The steps of a trace: name, why it exists, common mistake. The English texts come from Python: tracing/_explanations.py.

type Step = Record<"de" | "zh", [name: string, why: string, mistake: string]>;

export const STEPS: Record<string, Step> = {
  input: {
    de: ["Eingabe", "Ein Vektor der Breite E für jede Position. In der Attention tauschen Positionen Information aus; die anderen Schichten eines Transformers verarbeiten jede Position für sich.", "Token-IDs statt Vektoren übergeben (zuerst kommt ein Embedding), oder [Länge, Batch, E]: Hier ist der Batch die erste Achse; in nn.MultiheadAttention ist er die zweite, außer mit batch_first=True."],
    zh: ["输入", "每个位置一个宽度为 E 的向量。注意力是各位置交换信息的地方；Transformer 的其他层各自处理每个位置。", "传入词元编号而不是向量（应先做嵌入），或传入 [长度, 批次, E]：此处批次是第一个轴；在 nn.MultiheadAttention 中它是第二个，除非 batch_first=True。"],
  },
  context: {
    de: ["Kontext", "Cross-Attention: Die Queries kommen aus x, Keys und Values aus einer anderen Folge, etwa wenn ein Decoder liest, was ein Encoder geschrieben hat.", "Beide vertauschen. Die Ausgabe hat eine Position je Query, ist also so lang wie x, nie so lang wie der Kontext."],
    zh: ["上下文", "交叉注意力：查询来自 x，键和值来自另一个序列，例如解码器读取编码器写出的内容。", "把两者弄反。输出对每个查询有一个位置，因此与 x 等长，而不与上下文等长。"],
  },
  queries: {
    de: ["Queries", "Eine Query ist das, wonach eine Position sucht. W_q wird getrennt von W_k gelernt, daher kann sich das Gesuchte vom Angebotenen unterscheiden.", "Mit W statt Wᵀ multiplizieren: nn.Linear speichert sein Gewicht als [out, in]. Bei quadratischem W stimmt die Form so oder so."],
    zh: ["查询", "查询是一个位置要寻找的东西。W_q 与 W_k 分开学习，因此寻找的内容可以不同于提供的内容。", "乘以 W 而不是 Wᵀ：nn.Linear 以 [out, in] 保存权重。W 为方阵时，两种写法的形状都对。"],
  },
  keys: {
    de: ["Keys", "Ein Key ist das, woran eine Position erkannt wird: Das Skalarprodukt misst, wie gut Query i zu Key j passt.", "Eine Matrix für Queries und Keys verwenden: i passt dann zu j genau so gut wie j zu i, und die meisten Positionen passen am besten zu sich selbst."],
    zh: ["键", "键是一个位置被匹配的依据：点积衡量查询 i 与键 j 的匹配程度。", "查询和键共用一个矩阵：这样 i 与 j 的匹配程度和 j 与 i 完全相同，而且多数位置与自身最匹配。"],
  },
  values: {
    de: ["Values", "Ein Value ist das, was eine Position weitergibt, wenn eine Query zu ihrem Key passt. Beide sind getrennt, wie der Text eines Buchs und seine Karteikarte.", "x oder die Keys statt der Values mitteln: Die Formen stimmen, also schlägt nichts fehl."],
    zh: ["值", "值是查询与某位置的键匹配时该位置传出的内容。两者是分开的，就像书的正文与它的目录卡片。", "对 x 或键而不是值取平均：形状一致，所以不会报错。"],
  },
  "split queries": {
    de: ["Queries aufteilen", "Die Breite wird in H Stücke der Breite D geteilt, damit H Heads zu den Kosten eines breiten Heads nach Verschiedenem suchen können. Die Head-Achse rückt vor die Positionen: Matrixprodukte bleiben so innerhalb eines Heads.", "view(B, H, Q, D) ohne die Transposition. Die Form stimmt, die Zahlen nicht: Jeder „Head“ enthält dann eine Folge von Positionen statt eines Stücks jeder Position."],
    zh: ["拆分查询", "把宽度拆成 H 段，每段 D，使 H 个头能以一个宽头的代价寻找不同的内容。头轴移到位置轴之前：矩阵乘法便在每个头内进行。", "只用 view(B, H, Q, D) 而不转置。形状正确，数值不对：每个“头”装的是一段位置，而不是每个位置的一段。"],
  },
  "split keys": {
    de: ["Keys aufteilen", "Keys werden genau wie Queries aufgeteilt, sodass Head h der Queries mit Head h der Keys verglichen wird.", "Als view(B, K, D, H) aufteilen: Die Zeilen von W sind Head für Head geordnet, die D Spalten eines Heads liegen also beieinander."],
    zh: ["拆分键", "键与查询以完全相同的方式拆分，使查询的头 h 与键的头 h 比较。", "用 view(B, K, D, H) 拆分：W 的行按头依次排列，因此每个头的 D 列是相邻的。"],
  },
  "split values": {
    de: ["Values aufteilen", "Jeder Head mischt nur sein eigenes Stück der Values und trägt so seinen eigenen Teil zum Ergebnis bei.", "Heads gleich nach der Projektion in den Batch falten, view(B * H, K, D): Zuerst kommt transpose(1, 2)."],
    zh: ["拆分值", "每个头只混合自己那一段值，从而为结果贡献自己的部分。", "投影之后立即用 view(B * H, K, D) 把头并入批次：应先做 transpose(1, 2)。"],
  },
  "normalise queries": {
    de: ["Queries normieren", "Eine Norm legt die Länge jeder Query vor der gelernten Verstärkung fest. Scores hängen dann von Richtungen ab und können im Training nicht unbegrenzt wachsen, was alles Gewicht auf einen Key legen würde.", "Nach der Rotation normieren: Die Verstärkung ist je Komponente verschieden und würde nicht mehr auf die Komponenten wirken, für die sie trainiert wurde."],
    zh: ["归一化查询", "归一化在可学习增益之前固定每个查询的长度。得分因此取决于方向，训练中不会无限增大而把全部权重集中到一个键上。", "在旋转之后归一化：各分量的增益不同，便不再作用于它训练时对应的分量。"],
  },
  "normalise keys": {
    de: ["Keys normieren", "Die Keys haben eine eigene Norm mit eigener Verstärkung, damit ein langer Key nicht jede Query anzieht.", "Eine Verstärkung für Queries und Keys: q_norm und k_norm sind getrennte Parameter. Oder: die Norm über die ganze Breite, alle Heads zusammen, wo das Modell sie je Head hat (oder umgekehrt)."],
    zh: ["归一化键", "键有自己的归一化和增益，因此长的键不会吸引所有查询。", "查询和键共用一个增益：q_norm 与 k_norm 是不同的参数。或者：模型按头归一化，却对整个宽度（所有头一起）归一化（或相反）。"],
  },
  "rotate queries": {
    de: ["Queries rotieren", "Attention selbst ignoriert die Reihenfolge der Positionen. Rotary dreht jedes Komponentenpaar um einen Winkel proportional zur Position. Das Skalarprodukt zweier gedrehter Vektoren hängt nur vom Abstand i − j ab.", "Falsche Komponenten paaren: n mit n + D/2 (Hugging Face) oder 2n mit 2n + 1 (Paper, Llamas eigene Gewichte). Die Formen stimmen, und ein Modell mit geladenen Gewichten liefert Unsinn."],
    zh: ["旋转查询", "注意力本身不考虑位置的顺序。旋转编码把每对分量旋转一个与位置成正比的角度。两个旋转后向量的点积只取决于距离 i − j。", "分量配对错误：n 配 n + D/2（Hugging Face），或 2n 配 2n + 1（论文、Llama 原始权重）。形状一致，但加载权重的模型会输出乱码。"],
  },
  "rotate keys": {
    de: ["Keys rotieren", "Keys drehen sich um dieselben Winkel wie Queries, jeder an seiner Position. Ein Cache speichert gedrehte Keys, sodass jeder Key einmal gedreht wird.", "Auch die Values drehen, oder in jedem Decodierschritt wieder bei Position 0 beginnen: Die Position eines neuen Tokens ist die Anzahl der Tokens davor."],
    zh: ["旋转键", "键按自己的位置旋转与查询相同的角度。缓存保存旋转后的键，因此每个键只旋转一次。", "把值也旋转，或每个解码步都从位置 0 开始：新词元的位置是它之前的词元数。"],
  },
  "share keys": {
    de: ["Keys teilen", "Es gibt weniger Key-Heads als Query-Heads: Jeder Key-Head bedient eine Gruppe von H / Hkv Query-Heads, und der Key-Cache ist um diesen Faktor kleiner.", "repeat statt repeat_interleave: Head h würde dann Key-Head h mod Hkv statt ⌊h · Hkv / H⌋ nutzen, für den die Gewichte trainiert wurden."],
    zh: ["共享键", "键头比查询头少：每个键头服务一组 H / Hkv 个查询头，键的缓存也按此倍数缩小。", "用 repeat 而不是 repeat_interleave：头 h 会使用键头 h mod Hkv，而不是权重训练时对应的 ⌊h · Hkv / H⌋。"],
  },
  "share values": {
    de: ["Values teilen", "Die Values werden von denselben Gruppen geteilt wie die Keys.", "Keys und Values in verschiedener Reihenfolge teilen: Die Gewichte eines Key-Heads würden auf die Values eines anderen wirken."],
    zh: ["共享值", "值由与键相同的组共享。", "键和值以不同的顺序共享：一个键头的权重会作用到另一个的值上。"],
  },
  scores: {
    de: ["Scores", "Das Skalarprodukt einer Query mit einem Key misst, wie gut sie passen. Es summiert D Produkte, seine Streuung wächst also wie √D; das Teilen durch √D verhindert, dass die Softmax vor dem Training alles Gewicht auf einen Key legt.", "Durch √E (√embed_dim) statt √D (√head_dim) teilen: Mit H Heads sind die Scores √H-mal zu klein und die Gewichte zu gleichmäßig. Die Formen verraten es nicht."],
    zh: ["得分", "查询与键的点积衡量它们的匹配程度。它是 D 个乘积之和，离散程度随 √D 增大；除以 √D 可避免训练前 softmax 把全部权重集中到一个键上。", "除以 √E（√embed_dim）而不是 √D（√head_dim）：有 H 个头时，得分小了 √H 倍，权重过于均匀。形状看不出问题。"],
  },
  softcap: {
    de: ["Softcap", "tanh hält jeden Score zwischen −c und c, ohne harte Kante, an der der Gradient verschwände; so kann kein einzelner Treffer dominieren.", "Nach der Maske begrenzen: Aus −∞ würde −c, und maskierte Keys erhielten Gewicht."],
    zh: ["软上限", "tanh 把每个得分限制在 −c 与 c 之间，没有使梯度消失的硬边界，因此没有单个匹配能占据主导。", "在掩码之后限制：−∞ 会变成 −c，被遮住的键会得到权重。"],
  },
  "position bias": {
    de: ["Positions-Bias", "Für jede Distanz und jeden Head wird eine Zahl zum Score addiert, sodass nahe Keys mehr wiegen können als ferne. ALiBi hat eine feste Steigung je Head; T5 lernt eine Tabelle von Buckets, die mit der Distanz breiter werden.", "i und j vertauschen: ALiBi ändert sich nicht, aber T5s bidirektionale Buckets haben getrennte Hälften für Keys vor und nach der Query. T5 hat auch keinen Faktor 1 / √D, seine Module brauchen also scale=1."],
    zh: ["位置偏置", "按距离和头给得分加上一个数，使近处的键可以比远处的更重。ALiBi 每个头有固定的斜率；T5 学习一张分桶表，桶随距离变宽。", "把 i 与 j 弄反：ALiBi 不变，但 T5 的双向桶对查询之前和之后的键各有一半。T5 也没有 1 / √D 因子，因此其模块需要 scale=1。"],
  },
  bias: {
    de: ["Bias", "Eine Zahl, die zu jedem Score addiert wird, oft eine Funktion der Distanz zwischen i und j (ALiBi, T5, relative Positionen): Attention selbst ignoriert die Reihenfolge der Positionen.", "Sie vor der Skalierung addieren, die sie dann mitskaliert; oder eine boolesche Maske als Bias übergeben, was nur 0 oder 1 addiert."],
    zh: ["偏置", "加到每个得分上的一个数，常是 i 与 j 之间距离的函数（ALiBi、T5、相对位置）：注意力本身不考虑位置的顺序。", "在缩放之前相加，这样它也被缩放；或把布尔掩码当作偏置传入，那只会加 0 或 1。"],
  },
  mask: {
    de: ["Maske", "exp(−∞) = 0: Ein maskierter Key erhält genau das Gewicht 0, sein Anteil geht an die anderen. Eine kausale Maske verbirgt die Zukunft; ohne sie könnte ein Modell im Training die Antwort lesen, die es vorhersagen soll.", "Polarität: Hier und in scaled_dot_product_attention bedeutet True = beachten; in nn.MultiheadAttention True = maskiert. Nach der Softmax maskieren: Die übrigen Gewichte ergeben nicht mehr 1."],
    zh: ["掩码", "exp(−∞) = 0：被遮住的键权重恰为 0，其份额归其他键。因果掩码隐藏未来；没有它，训练中的模型会读到本应预测的答案。", "极性：此处和 scaled_dot_product_attention 中 True = 可关注；nn.MultiheadAttention 中 True = 遮住。在 softmax 之后遮住：其余权重之和不再为 1。"],
  },
  "bias key": {
    de: ["Bias-Key", "Jeder Head hat einen gelernten Key, der zu keinem Token gehört. Eine Query, die unter den Tokens nichts findet, kann ihr Gewicht diesem Key geben; die Matrix hat also eine Spalte mehr.", "Vergessen, die Maske um eine Spalte zu erweitern: Eine Zeile, die alle Tokens maskiert, muss noch auf diesen Key achten, und eine an der letzten Spalte ausgerichtete kausale Maske wäre um eins verschoben."],
    zh: ["偏置键", "每个头有一个学习得到的、不属于任何词元的键。在词元中找不到内容的查询可以把权重给它，因此矩阵多一列。", "忘记给掩码加一列：遮住所有词元的行仍须能关注这个键，而与最后一列对齐的因果掩码会错一位。"],
  },
  weights: {
    de: ["Gewichte", "Softmax macht aus den Scores jeder Query Anteile, die mindestens 0 sind und zusammen 1 ergeben. Bilder von Attention zeigen diese Matrix: Zeile = Query, Spalte = Key.", "Softmax über die falsche Achse. Sie läuft über die Keys, dim=-1; dim=1, richtig für eine einzelne Matrix [Q, K], ist die Head-Achse von [B, H, Q, K], und die Form ist dieselbe."],
    zh: ["权重", "softmax 把每个查询的得分变成不小于 0 且总和为 1 的份额。注意力图画的就是这个矩阵：行 = 查询，列 = 键。", "在错误的轴上做 softmax。应对键做，即 dim=-1；dim=1 对单个 [Q, K] 矩阵正确，但在 [B, H, Q, K] 中是头轴，形状却相同。"],
  },
  "bias value": {
    de: ["Bias-Value", "Der gelernte Value dieses Keys: was ein Head weitergibt, wenn kein Token passt. Er wird zuletzt angehängt, wie der Key.", "Einen Key ohne Value anhängen, als Sink: Das Gewicht eines Sinks gibt nichts weiter, das von bias_kv gibt bias_v weiter."],
    zh: ["偏置值", "该键的学习得到的值：没有词元匹配时头传出的内容。与键一样附在最后。", "附加键而不附加值，当作汇聚点：汇聚点的权重不传出任何内容，bias_kv 的权重传出 bias_v。"],
  },
  "head outputs": {
    de: ["Head-Ausgaben", "In jedem Head ist die Ausgabe einer Query der Mittelwert der Values, gewichtet mit ihrer Zeile von Gewichten.", "Die Gewichte mit den Keys statt den Values multiplizieren, oder pᵀ v: In Self-Attention haben beide die richtige Form."],
    zh: ["头的输出", "在每个头中，查询的输出是值按其权重行的加权平均。", "把权重乘以键而不是值，或用 pᵀ v：在自注意力中两者形状都对。"],
  },
  concatenation: {
    de: ["Verkettung", "Die Heads werden wieder nebeneinander gesetzt, sodass jede Position einen Vektor hat. Das ist die Umkehrung der Aufteilung: zurücktransponieren, dann zusammenfügen.", "reshape(B, Q, H * D) ohne zurückzutransponieren: Die Form stimmt, aber Positionen und Heads sind vermischt. Nach der Transposition schlägt view fehl, weil der Speicher nicht zusammenhängt; .contiguous().view(…) oder .reshape(…) kopiert."],
    zh: ["拼接", "把各头重新并排，使每个位置有一个向量。这是拆分的逆操作：先转置回来，再合并。", "不转置就 reshape(B, Q, H * D)：形状正确，但位置和头混在一起。转置后 view 会失败，因为内存不连续；.contiguous().view(…) 或 .reshape(…) 会复制。"],
  },
  gate: {
    de: ["Gate", "Eine Zahl zwischen 0 und 1 für jede Ausgabekomponente jedes Heads, berechnet aus x. Ein Head kann sich für ein Token abschalten, statt auf irgendeinen bedeutungslosen Key zu achten.", "Das Gate aus den Ausgaben der Heads berechnen: Es liest x, die Eingabe der Schicht. Oder ein Gate ohne Sigmoid."],
    zh: ["门控", "由 x 算出的、每个头每个输出分量一个 0 到 1 之间的数。头可以对某个词元关闭自己，而不必关注某个无意义的键。", "用头的输出计算门控：它读取的是 x，即该层的输入。或者门控没有 sigmoid。"],
  },
  "gated outputs": {
    de: ["gesteuerte Ausgaben", "Das Gate multipliziert die Ausgaben elementweise, bevor W_o die Heads mischt.", "Nach der Ausgabeprojektion steuern: W_o hat die Heads dann schon gemischt, kein Head lässt sich einzeln schließen."],
    zh: ["门控后的输出", "在 W_o 混合各头之前，门控逐元素乘以输出。", "在输出投影之后门控：那时 W_o 已混合各头，无法单独关闭某个头。"],
  },
  output: {
    de: ["Ausgabe", "W_o mischt die Ausgaben der Heads. Ohne sie schriebe jeder Head nur in seine eigenen D Ausgabespalten.", "Sie weglassen: Die Form stimmt schon nach der Verkettung, also schlägt nichts fehl."],
    zh: ["输出", "W_o 混合各头的输出。没有它，每个头只写入自己的 D 个输出列。", "省略它：拼接之后形状已经正确，所以不会报错。"],
  },
  "queries, keys, values": {
    de: ["Queries, Keys, Values", "Ein Matrixprodukt berechnet Queries, Keys und Values zusammen; sein Ergebnis wird in drei Teile geschnitten.", "Die Teile in anderer Reihenfolge schneiden als der, in der die Gewichte trainiert wurden: Die Formen stimmen."],
    zh: ["查询、键、值", "一次矩阵乘法同时算出查询、键和值；结果切成三部分。", "切分顺序与训练权重时不同：形状一致。"],
  },
  "keys, values": {
    de: ["Keys, Values", "Ein Matrixprodukt berechnet Keys und Values zusammen; sein Ergebnis wird in zwei Teile geschnitten.", "Die beiden Teile vertauschen: Die Formen stimmen, also schlägt nichts fehl."],
    zh: ["键、值", "一次矩阵乘法同时算出键和值；结果切成两部分。", "把两部分弄反：形状一致，所以不会报错。"],
  },
  "change queries": {
    de: ["Queries ändern", "Der Code ändert die Queries, bevor sie verglichen werden: Er normiert sie oder dreht sie nach ihrer Position (Rotary Embedding).", "Die Queries ändern, aber nicht die Keys, oder erst nach dem Zusammenfügen der Heads statt in jedem Head."],
    zh: ["变换查询", "代码在比较之前变换查询：对它们归一化，或按位置旋转（旋转编码）。", "只变换查询而不变换键，或在合并各头之后而不是在每个头内变换。"],
  },
  "change keys": {
    de: ["Keys ändern", "Die Keys werden wie die Queries geändert, damit beide unter denselben Bedingungen verglichen werden.", "Die Keys eines Caches ein zweites Mal drehen: Ihre Positionen ändern sich nicht."],
    zh: ["变换键", "键与查询一样变换，使两者在相同条件下比较。", "把缓存中的键再旋转一次：它们的位置不变。"],
  },
  scale: {
    de: ["Skalierung", "Ein Skalarprodukt summiert D Produkte, seine Streuung wächst also wie √D. Das Teilen durch √D verhindert, dass die Softmax vor dem Training alles Gewicht auf einen Key legt.", "Durch √embed_dim statt √head_dim teilen, zweimal skalieren oder gar nicht. Die Formen verraten es nicht."],
    zh: ["缩放", "点积是 D 个乘积之和，离散程度随 √D 增大。除以 √D 可避免训练前 softmax 把全部权重集中到一个键上。", "除以 √embed_dim 而不是 √head_dim，缩放两次，或不缩放。形状看不出问题。"],
  },
  dropout: {
    de: ["Dropout", "Im Training setzt Dropout zufällige Gewichte auf 0 und vergrößert die anderen, damit sich kein Head auf einen einzigen Key verlässt.", "Es in eval eingeschaltet lassen: Dieselbe Eingabe ergibt dann jedes Mal eine andere Ausgabe."],
    zh: ["dropout", "训练时 dropout 随机把一些权重置 0 并放大其余权重，使头不依赖单个键。", "在 eval 模式下仍然开启：相同的输入每次输出不同。"],
  },
  "mask after the softmax": {
    de: ["Maske nach der Softmax", "Gewichte verborgener Paare werden nach der Softmax auf 0 gesetzt. Das ist richtig für Zeilen, in denen alles verborgen ist.", "Nur hier maskieren: Die übrigen Gewichte einer Zeile ergeben nicht mehr 1."],
    zh: ["softmax 之后的掩码", "在 softmax 之后把隐藏对的权重置 0。对全部被隐藏的行这样做是对的。", "只在这里遮住：一行其余权重之和不再为 1。"],
  },
  "scale after the softmax": {
    de: ["Skalierung nach der Softmax", "Die Gewichte werden nach der Softmax mit einer Zahl multipliziert.", "Die Skalierung gehört vor die Softmax: danach ergeben die Gewichte einer Zeile nicht mehr 1."],
    zh: ["softmax 之后的缩放", "在 softmax 之后把权重乘以一个数。", "缩放应在 softmax 之前：之后缩放，一行权重之和不再为 1。"],
  },
};
