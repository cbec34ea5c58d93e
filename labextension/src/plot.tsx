import * as React from 'react';

import type { IThisSession } from './tokens';

const WIDTH = 240;
const HEIGHT = 48;
/** More than this many periods without a point is a gap, and no line is drawn over it. */
const GAP = 2.5;

export interface IPoint {
  at_s: number;
  value: number | null;
}

/** Return the line through the points in the plot's coordinates, in segments: unknown values leave gaps. */
export function lineSegments(
  points: readonly IPoint[],
  max: number,
  everyS: number
): [number, number][][] {
  const first = points[0]?.at_s ?? 0;
  const last = points[points.length - 1]?.at_s ?? 0;
  const span = Math.max(1, last - first);
  const segments: [number, number][][] = [];
  let before: number | null = null;
  for (const { at_s, value } of points) {
    if (value === null) {
      before = null;
      continue;
    }
    const x = (WIDTH * (at_s - first)) / span;
    const y = HEIGHT - (HEIGHT * Math.min(max, Math.max(0, value))) / max;
    const segment = segments[segments.length - 1];
    if (before === null || segment === undefined || at_s - before > GAP * everyS) {
      segments.push([[x, y]]);
    } else {
      segment.push([x, y]);
    }
    before = at_s;
  }
  return segments;
}

/** Return the largest value that is known, or null. */
export function peak(points: readonly { value: number | null }[]): number | null {
  const known = points.flatMap(p => (p.value === null ? [] : [p.value]));
  return known.length === 0 ? null : Math.max(...known);
}

/**
 * Return the measured points, and one more with the memory in use now as seen from inside the session. The machine is
 * measured some seconds later: without that point the plot would show less than the number above it.
 */
export function withNow<P extends { at_s: number; memory_used_mib: number | null }>(
  measured: readonly P[],
  session: Pick<IThisSession, 'gpu_memory_used_mib'>,
  everyS: number
): (P | { at_s: number; memory_used_mib: number; sm_percent: null })[] {
  const used = session.gpu_memory_used_mib;
  const last = measured[measured.length - 1];
  if (used === null || last === undefined) {
    return [...measured];
  }
  return [
    ...measured,
    // By the machine's clock: the browser's may be another.
    { at_s: last.at_s + everyS, memory_used_mib: used, sm_percent: null }
  ];
}

/** A small plot of the last minutes; `mark` is drawn as a dashed line, such as the session's share. */
export function Plot({ points, max, everyS, mark, label, caption }: {
  points: readonly IPoint[];
  max: number;
  everyS: number;
  mark?: number | null;
  /** What the plot shows, in words, for screen readers. */
  label: string;
  caption: string;
}): JSX.Element {
  const segments = lineSegments(points, max, everyS);
  const text = (line: [number, number][]) =>
    line.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(' ');
  const markY = mark ? HEIGHT - (HEIGHT * Math.min(max, mark)) / max : null;
  return (
    <figure className="jp-fgpu-Plot">
      <svg
        role="img"
        aria-label={label}
        viewBox={`0 -1 ${WIDTH} ${HEIGHT + 2}`}
        preserveAspectRatio="none"
      >
        {segments.map((line, index) => (
          <polygon
            key={`a${index}`}
            points={`${line[0]![0]},${HEIGHT} ${text(line)} ${line[line.length - 1]![0]},${HEIGHT}`}
          />
        ))}
        {segments.map((line, index) => (
          <polyline
            key={`l${index}`}
            // A single point would not be seen.
            points={text(line.length > 1 ? line : [line[0]!, [line[0]![0] + 1, line[0]![1]]])}
            vectorEffect="non-scaling-stroke"
          />
        ))}
        {markY !== null && (
          <line
            x1={0}
            x2={WIDTH}
            y1={markY}
            y2={markY}
            vectorEffect="non-scaling-stroke"
          />
        )}
      </svg>
      <figcaption className="jp-fgpu-Minor">{caption}</figcaption>
    </figure>
  );
}
