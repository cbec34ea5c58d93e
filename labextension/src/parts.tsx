import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import { parkedText, roundText } from './format';
import type { IHubLocation } from './links';
import type { IProof, ISession, Wanted } from './tokens';

/** What the panel can do beyond showing; each asks the user where something would be lost. */
export interface IPanelActions {
  refresh(): void;
  stop(session: ISession): void;
  endThis(): void;
  keep(session: ISession): void;
  extend(session: ISession): void;
  park(session: ISession): void;
  wake(session: ISession): void;
  /** Give a session another amount; rejects with a message to show. */
  resize(id: number, wanted: Wanted): Promise<ISession>;
  /** What fgpu-verify has found; with `begin` it is run. */
  proof(begin: boolean): Promise<IProof>;
}

/** What every part of the panel needs. */
export interface IContext {
  trans: TranslationBundle;
  hub: IHubLocation;
  actions: IPanelActions;
}

/** Says that there is no GPU. */
export function SimulatedMark(props: { trans: TranslationBundle }): JSX.Element {
  return (
    <span
      className="jp-fgpu-Simulated"
      title={props.trans.__('No real GPU is behind these numbers.')}
    >
      {props.trans.__('simulated')}
    </span>
  );
}

/** A part of the panel, under its title. */
export function Section(props: {
  title: string;
  children: React.ReactNode;
}): JSX.Element {
  return (
    <section aria-label={props.title}>
      <h3>{props.title}</h3>
      {props.children}
    </section>
  );
}

/** A bar of `percent` of its length, for those who see it; `text` says the same. */
export function Bar(props: {
  label: string;
  text: string;
  percent: number;
  high?: boolean;
}): JSX.Element {
  const { label, text, percent, high } = props;
  return (
    <div
      className={`jp-fgpu-Bar${high ? ' jp-fgpu-mod-high' : ''}`}
      role="meter"
      aria-label={label}
      aria-valuemin={0}
      aria-valuemax={100}
      aria-valuenow={percent}
      aria-valuetext={text}
    >
      <div style={{ width: `${percent}%` }} />
    </div>
  );
}

/** A link to another page, which opens in a tab of its own. */
export function Away(props: {
  href: string | null;
  label?: string;
  children: React.ReactNode;
}): JSX.Element | null {
  return props.href === null ? null : (
    <a href={props.href} target="_blank" rel="noopener" aria-label={props.label}>
      {props.children}
    </a>
  );
}

/** The button that makes the time limit of a session longer, where that may be. */
export function Extend(props: {
  session: ISession;
  context: IContext;
}): JSX.Element | null {
  const { session, context } = props;
  const { trans, actions } = context;
  if (session.extend_by_s === null || session.id === null) {
    return null;
  }
  const by = roundText(session.extend_by_s, trans);
  const name = session.display_name || trans.__('the session');
  return (
    <button
      type="button"
      aria-label={trans.__('Extend by %1: %2', by, name)}
      onClick={() => actions.extend(session)}
    >
      {trans.__('Extend by %1', by)}
    </button>
  );
}

/** What a parked session keeps, with the button that asks for its GPU; or the button that parks a running one. */
export function Parking(props: {
  session: ISession;
  context: IContext;
}): JSX.Element | null {
  const { session, context } = props;
  const { trans, actions } = context;
  const text = parkedText(session, Date.now(), trans);
  const name = session.display_name || trans.__('the session');
  if (session.id === null || (text === null && !session.can_park)) {
    return null;
  }
  return (
    <div>
      {text !== null && <div role="status">{text}</div>}
      {session.parked !== null && !session.parked.wanted && (
        <button
          type="button"
          aria-label={trans.__('Get the GPU for %1', name)}
          onClick={() => actions.wake(session)}
        >
          {trans.__('Get GPU')}
        </button>
      )}
      {session.can_park && (
        <button
          type="button"
          aria-label={trans.__('Park %1', name)}
          title={trans.__('Give the GPU to others; kernels and variables stay')}
          onClick={() => actions.park(session)}
        >
          {trans.__('Park')}
        </button>
      )}
    </div>
  );
}
