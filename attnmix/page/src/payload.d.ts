// Written by attnmix/page/shape.py.
export type Series = { values: (number | null)[]; low: (number | null)[]; high: (number | null)[]; texts?: number };
export type Heads = {
  scores: number[][];
  reach: string;
  source_norms: string;
  key_heads: number;
  bits: number;
  query: string;
  key: string;
  sums?: string;
  vectors?: Record<string, string>;
  query_scales?: string;
  key_scales?: string;
};
export type Payload = {
  wording: Record<string, string>;
  pointsPerSecond: number;
  labels: {
    methods: Record<string, string>;
    checkpoints: Record<string, string>;
    matrices: Record<string, string>;
    importance: Record<string, string>;
    controls: Record<string, string>;
    derivatives: Record<string, string>;
    layers: string[];
  };
  captured: string;
  ownBasis: string[];
  method: string;
  layer: number;
  importance: Record<string, { limit: number; values: string }>;
  reviews: { names: string[]; total: number; values: Record<string, Record<string, string>> };
  answer: {
    headline: string;
    sentences: string[];
    notes: Record<string, string>;
    chart: {
      title: string;
      series: {
        name: string;
        values: (number | null)[];
        low: (number | null)[];
        high: (number | null)[];
        texts?: number;
      }[];
      unit: string;
      means: string;
    };
  };
  cautions: { answer: string; map: Record<string, string> };
  sinceInput: string[];
  opens: { document: number; positions: number[] };
  curves: Record<string, Record<string, Series>>;
  controls: Record<string, Record<string, Record<string, Series>>>;
  sources: Record<string, Record<string, Record<string, Series>>>;
  classShares: Record<string, Series>;
  probes: Record<string, Record<string, Series>>;
  neighboursKept: Record<string, (number | null)[][]>;
  documents: {
    name: string;
    title: string;
    heading: string;
    start: number;
    length: number;
    direction: string;
    note: string;
    caution: string;
    label: string | null;
    predicted: string | null;
    probability: number | null;
    reads: number | null;
  }[];
  encoder: number | null;
  readings: { names: string[]; words: string[]; apart: number[]; classes: number[] }[];
  classNames: string[];
  specialClasses: number[];
  wordClasses: number[];
  ratios: { methods: string[]; layers: number; values: Record<string, Record<string, string>> };
  contributions: Record<
    string,
    Record<string, { counts: string; sources: string; checkpoints: Record<string, { shares: string; own: string }> }>
  >;
  sourcesKept: number;
  partsLimit: number;
  exchangeLimit: number;
  matrices: string[];
  attention: { number: number; width: number; skip: boolean };
  sites: { layer: number; point: string; label: string; reading: number }[];
  mapNote: string;
  maps: Record<string, { x: string; y: string; absent: number[] }>;
  variances: (number | null)[][];
  nearest: { number: number; tokens: string };
};
